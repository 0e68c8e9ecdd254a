#!/usr/bin/env bash
# Measures the tables of benchmarks/gpu.md on one GPU in about eight minutes:
#
#   bash benchmarks/device.sh FOLDER          # the most important tables first
#   bash benchmarks/device.sh FOLDER small    # small versions of all steps, also on a CPU
#
# Each step writes its table to FOLDER/STEP.md and its log to FOLDER/STEP.log. Kernels
# need tokamax and jax-linear-attention (docs/howto/accelerators.md); rows name missing
# packages.
set -u
out=${1:?bash benchmarks/device.sh FOLDER [small]}
mkdir -p "$out"
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$out/programs}
lengths=4096,16384 heads=16 steps=40 minutes=1.5
text=(model.num_layers=12 model.num_heads=12 model.features=768
  model.mlp_features=3072 model.dtype=bfloat16 task.context=1024 batch_size=32)
if [[ ${2-} == small ]]; then
  lengths=64,128 heads=2 steps=4 minutes=0.2
  text=(model.num_layers=4 model.features=32 model.mlp_features=64
    task.context=32 batch_size=2)
fi

step() { # NAME SECONDS COMMAND…
  timeout "$2" "${@:3}" >"$out/$1.md" 2>"$out/$1.log" ||
    echo "$1: ended with $? (124: no time left): $(tail -n 1 "$out/$1.log")"
}

times() { # NAME SECONDS HEAD_DIM MECHANISMS
  step "$1" "$2" python -m benchmarks.scaling --dtype=bfloat16 --batch=2 \
    --heads=$((heads * 64 / $3)) --head_dim="$3" --lengths=$lengths \
    --minutes=$minutes --max_gib=40 --attention="$4"
}

tokens() { # NAME MECHANISMS
  step "tokens_$1" 90 python train.py --config=configs/text.py:"$2" \
    --config.task.path="$out/text.txt" --config.num_steps=$steps \
    --config.log_every=$((steps / 4)) --config.eval_every=$steps \
    "${text[@]/#/--config.}"
}

recurrences=flash/cudnn
for name in retention mamba2 mamba3 gated_linear delta gated_delta kimi_delta \
  gated_delta_2 delta_product rwkv7; do
  recurrences+=,$name,$name/jla
done

cat docs/*.md docs/*/*.md >"$out/text.txt"
times selected 150 64 flash/cudnn,moba,nsa,dsa,stick_breaking,path
tokens flash flash
tokens gated_delta gated_delta
tokens gated_delta_jla gated_delta:implementation=jla
tokens hybrid gated_delta,gated_delta,gated_delta,flash
times kernels 120 64 $recurrences
times kernels_128 90 128 $recurrences
step agreement 120 python -m benchmarks.agreement \
  --attention=moba,nsa,dsa,stick_breaking,path,kimi_delta/jla,rwkv7/jla
