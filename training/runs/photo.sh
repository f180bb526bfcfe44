#!/bin/sh
# Both photo lines from their folders to their tables; call it again after an interruption.
# Usage: DATA=folder-of-the-development-sets sh training/runs/photo.sh
# Time on one idle core of a server CPU with AVX512-BF16, CPU minutes: tile 3 folds x 2 methods x
# TILE, screws 5 folds x SCREWS, and a few minutes for export and evaluation.
set -eu
: "${DATA:?folder that holds magnetic_tile and screws_missing}"
OUT="${OUT:-.work/photo}"
python -m training.photo_lines screws --data "$DATA/screws_missing" --out "$OUT" --minutes "${SCREWS:-8}"
python -m training.photo_lines tile --data "$DATA/magnetic_tile" --out "$OUT" --minutes "${TILE:-8}"
