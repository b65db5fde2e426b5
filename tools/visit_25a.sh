#!/bin/bash
# First visit: the products' collection (5.4 minutes), then PyTorch's own templates (about 3.3).
export PYTHONPATH=src:. PYTHONUNBUFFERED=1 TILEWISE_NATIVE=0
nvidia-smi --query-gpu=name,driver_version,clocks.sm --format=csv,noheader
timeout 345 python3 -m tools.gpu_visit --minutes 5.4 --products 240 --seed 1 --out "$OUT" 2>&1 | tail -60
timeout 205 python3 -m tools.visit_inductor --seconds 190 --out "$OUT" 2>&1 | tee "$OUT/inductor.log" | tail -80
ls -l "$OUT"
