"""Random programs: small networks over every layer, on which all ways to compute a result must agree.

A program (`program.py`) is a list of operations that is written as one line of JSON. `draw.py` draws programs from a
seed, `network.py` and `onnx_file.py` build one as a module and as an ONNX file, and `oracles.py` runs it eagerly, as a
float plan, in INT8 and through ONNX, and compares the results. `minimise.py` shrinks a program that fails.

`make test` checks 2,000 programs. Their seed is the date, so that every day brings new ones;
``TILEWISE_PROGRAM_SEED=20260131 make test`` repeats a day. A failure prints the program, minimised, as a line of JSON:
put it into a file `regressions/<what went wrong>.json`, where it is checked at every run, and fix the fault.

    python -m tests.programs --count 20000 --seed 7      # many more programs, as `make programs` runs them
    python -m tests.programs --check FILE.json           # the programs of a file
"""
