#!/bin/bash
# Third visit: unseen products with the model's choices and a peer's (110 s), then torch.compile in several ways (165 s).
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 TILEWISE_NATIVE=0
timeout 60 python3 -m tools.smoke_products 2>&1 | tail -25 | cut -c1-330
timeout 125 python3 -m tools.gpu_visit --minutes 1.9 --products 50 --seed 9 --check benchmarks/results/nvmatmul_answers.json --out "$OUT" 2>&1 | tail -8
timeout 175 python3 -m benchmarks.inductor --seconds 135 --seed 21 --ways aten max-autotune tilewise --out "$OUT" > "$OUT/race.log" 2>&1
grep -E "us/|as long|out of time|note:|Error" "$OUT/race.log" | cut -c1-200 | tail -40
