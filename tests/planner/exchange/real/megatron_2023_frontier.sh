#!/bin/bash
# Written after the form of scripts on Slurm clusters: one string of flags, passed through bash -c
#SBATCH -N 16
export MASTER_ADDR=$(scontrol show hostnames $SLURM_NODELIST | head -n1)
TP=${TP:-8}
PP=2
NUM_MICROBATCHES=4
case ${MODEL_SIZE:-22} in
    1) LAYERS=24; HIDDEN=2048; HEADS=16 ;;
    22) LAYERS=48; HIDDEN=6144; HEADS=64 ;;
esac
GPUS=$((SLURM_NNODES * 8))
GPT_ARGS="--tensor-model-parallel-size ${TP} \
          --pipeline-model-parallel-size ${PP} \
          --num-layers $LAYERS \
          --hidden-size $HIDDEN \
          --num-attention-heads ${HEADS} \
          --seq-length 2048 \
          --max-position-embeddings 2048 \
          --micro-batch-size 2 \
          --global-batch-size $((2 * NUM_MICROBATCHES * 8)) \
          --no-such-flag 3 \
          --vocab-size 51200"
if [ "${RECOMPUTE:-1}" -eq 1 ] && [[ $PP -gt 1 ]]; then
    GPT_ARGS="$GPT_ARGS --recompute-granularity full --recompute-method block --recompute-num-layers 2"
fi
[ -n "${FP16}" ] || GPT_ARGS+=" --bf16"
launch() {
    srun -u -n $GPUS --gpus-per-node=8 bash -c "python pretrain_gpt.py $GPT_ARGS --num-layers-per-virtual-pipeline-stage 6" 2>&1 | tee log.txt
}
launch
