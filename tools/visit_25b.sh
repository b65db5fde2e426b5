#!/bin/bash
# Second visit: more products, most of all the library's (3.9 minutes at most), then torch.compile in several ways.
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 TILEWISE_NATIVE=0
timeout 250 python3 -m tools.gpu_visit --minutes 3.9 --products 110 --seed 3 --out "$OUT" 2>&1 | tail -12
timeout 115 python3 -m benchmarks.inductor --seconds 95 --seed 5 --ways aten max-autotune tilewise --out "$OUT" > "$OUT/race.log" 2>&1
grep -v -E "^(  triton|  mm|  bmm|strides|dtypes|AUTOTUNE|Autotune|SingleP|\{\"num)" "$OUT/race.log" | tail -60
