#!/usr/bin/env bash
# Layers timed and small jobs trained on one GPU, on a machine that may have no network.
#
#   bash benchmarks/gpu/run.sh prepare MEGATRON_LM [transformer_engine]   with a network, Python 3.12: fills .gpu/
#   bash benchmarks/gpu/run.sh measure OUT [SECONDS] [--engine]           on the GPU's machine, with .gpu/ there
#   bash benchmarks/gpu/run.sh page RESULTS                               at home: keeps what came back, writes docs/gpu.md
#
# MEGATRON_LM is a work tree of core_v0.19.0 or newer. PYTHON (prepare) is a Python 3.12; measure
# installs what .gpu/ holds into the python3 on the path, which has PyTorch. .gpu/base is what
# every machine needs; .gpu/engine-1, -2, ... are loads of Transformer Engine, each below 60 MiB, and
# --engine measures nothing but what needs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
exec </dev/null
ours=benchmarks/gpu
carried=${NEST_GPU_CARRIED:-$PWD/.gpu}

prepare() {
  local checkout=${1:?"usage: run.sh prepare MEGATRON_LM [transformer_engine]"}
  local python=${PYTHON:-python3.12} tree=$carried/base/megatron-lm
  rm -rf $carried/base && mkdir -p $carried/base/wheels "$tree"
  "$python" -m pip wheel --quiet --no-deps --wheel-dir $carried/base/wheels .
  "$python" -m pip wheel --quiet --no-deps --wheel-dir $carried/base/wheels --requirement $ours/wheels.txt
  # What pretrain_gpt.py imports; the index helper as the wheel has it, so that nothing is compiled there.
  tar -C "$checkout" --exclude=__pycache__ -cf - megatron pretrain_gpt.py gpt_builders.py model_provider.py |
    tar -C "$tree" -xf -
  rm -f "$tree"/megatron/core/datasets/helpers_cpp*
  "$python" -m zipfile -e $carried/base/wheels/megatron_core-*.whl $carried/base/core
  cp $carried/base/core/megatron/core/datasets/helpers_cpp* "$tree/megatron/core/datasets/"
  rm -rf $carried/base/core
  if [ "${2:-}" = transformer_engine ]; then engine "$python"; fi
  du -sm $carried/*
}

# Transformer Engine: its core library is one wheel of 270 MB; its PyTorch extension is built
# here, against the PyTorch of the GPU's machine ($ours/engine.txt), which takes an hour of a core.
engine() {
  local python=$1 work=$carried/engine-build
  rm -rf $carried/engine-* && mkdir -p $work/wheels
  "$python" -m venv $work/venv
  $work/venv/bin/pip install --quiet --requirement $ours/engine.txt
  local site
  site=$($work/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
  CUDA_HOME=${CUDA_HOME:-/usr/local/cuda} CPATH=$site/cudnn/include:$site/nccl/include:$site/cu13/include CUDNN_PATH=$site/cudnn \
    NVTE_FRAMEWORK=pytorch NVTE_CUDA_ARCHS=90 PATH=$work/venv/bin:$PATH \
    $work/venv/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir $work/wheels \
    $(sed -n 's/^# wheel: //p' $ours/engine.txt)
  tar -C $work -cf - wheels | split --bytes=50M --numeric-suffixes=1 --suffix-length=1 - $carried/engine.
  for part in $carried/engine.?; do mkdir -p "$carried/engine-${part##*.}" && mv "$part" "$carried/engine-${part##*.}/part"; done
  rm -rf $work
}

# Installs once what was carried here; Transformer Engine when all its loads have come.
install_carried() {
  local install=(python3 -m pip install --quiet --no-index --no-deps --no-warn-script-location)
  [ -e $carried/base.installed ] || "${install[@]}" $carried/base/wheels/*.whl
  touch $carried/base.installed
  if [ -e $carried/engine-1/part ] && [ ! -e $carried/engine.installed ]; then
    cat $carried/engine-?/part | tar -C $carried -xf -
    "${install[@]}" $carried/wheels/*.whl
    touch $carried/engine.installed
  fi
}

# Megatron-LM names its index helper after the python3-config that it finds, which may be another Python's.
name_helper() {
  mkdir -p $carried/bin
  printf '#!/bin/sh\nexec python3 -c "import sysconfig; print(sysconfig.get_config_var(%s))"\n' "'EXT_SUFFIX'" >$carried/bin/python3-config
  chmod +x $carried/bin/python3-config
  export PATH=$carried/bin:$PATH
}

measure() {
  local out=${1:?"usage: run.sh measure OUT [SECONDS] [--engine]"}
  [ ! -d $carried/base/wheels ] || install_carried
  name_helper
  export MEGATRON_LM_HOME=${MEGATRON_LM_HOME:-$carried/base/megatron-lm}
  python3 $ours/measure.py --out "$out" --seconds "${2:-560}" --jobs "${NEST_GPU_JOBS:-$ours/jobs.yaml}" "${@:3}"
}

case ${1:-} in
  prepare | measure) "$@" ;;
  page) shift && python $ours/page.py "$@" ;;
  *) sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" >&2 && exit 2 ;;
esac
