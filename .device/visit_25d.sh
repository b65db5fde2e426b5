#!/bin/bash
# A last look: matmul and linear as users call them (40 s at most), then torch.compile in three ways (130 s).
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 TILEWISE_NATIVE=0
timeout 60 python3 -m tools.smoke_products 2>&1 | tail -25 | cut -c1-330
timeout 150 python3 -m benchmarks.inductor --seconds 110 --seed 22 --ways aten max-autotune tilewise --out "$OUT" > "$OUT/race.log" 2>&1
grep -E "us/|as long|out of time|note:" "$OUT/race.log" | cut -c1-200 | tail -40
