"""The matrix of cases: real widths, fewer layers where all would only repeat the same bytes.

That layers repeat is shown by the cases of whole models next to the cut ones.
"""

from __future__ import annotations

from typing import Final

MATRIX: Final = """
# data parallelism and ZeRO, one and several micro-batches
llama-3-8b:4 s2048 b2
llama-3-8b:4 s2048 b2 m2
llama-3-8b:4 s8192 dp8
llama-3-8b:4 s8192 dp8 m4
llama-3-8b:4 s8192 dp8 zero1
llama-3-8b:4 s8192 dp8 zero1 m4
llama-3-8b:4 s8192 dp8 zero2
llama-3-8b:4 s8192 dp8 zero2 m4
llama-3-8b:4 s8192 dp8 zero3
llama-3-8b:4 s8192 dp8 zero3 m4
llama-3-8b:4 s1024 dp64 zero1 m4
llama-3-8b:4 s1024 dp64 zero2 m4
llama-3-8b:4 s512 dp64 zero3 m4
llama-3-8b:32 s8192 dp64 zero3
llama-3-8b:32 s8192 dp64 zero3 full
llama-3-8b:8 s8192 dp64 zero3 full
llama-3-8b:4 s8192 dp16 copies2 zero3
llama-3-8b:4 s2048 dp16 copies4 zero2 m2
llama-3-8b:4 s2048 dp16 copies4 zero1 m2
llama-3-8b:4 s2048 b2 fp32
llama-3-8b:4 s2048 b2 m2 fp32
llama-3-8b:4 s2048 dp8 zero1 m4 fp32
llama-3-8b:4 s2048 dp8 zero2 m4 fp32
llama-3-8b:4 s2048 dp8 zero3 m2 fp32
llama-3-8b:4 s2048 dp4 fp32
llama-3-8b:4 s2048 dp4 sgd
llama-3-8b:4 s2048 dp8 zero3 sgd m2
llama-3-8b:4 s2048 b4 fp16
llama-3-8b:4 s2048 b4 fp8
llama-3-8b:4 s8192 dp8 zero3 fp8
llama-3-8b:4 s8192 dp8 zero2 m4 full fp8
llama-3-8b:8 s4096 dp4 pp2 m4 zero1 fp8
gpt2-xl:4 s1024 b8 fp8
# recomputation
llama-3-8b:8 s8192 dp8 zero3 selective
llama-3-8b:8 s8192 dp8 zero3 b2 full
llama-3-8b:8 s8192 dp8 zero3 full:3
llama-3-8b:8 s8192 dp8 zero1 full m2
llama-3-8b:8 s2048 dp8 zero3 eager
llama-3-8b:8 s2048 dp8 zero3 eager selective
llama-3-8b:8 s2048 dp8 zero3 eager full
llama-3-8b:8 s2048 tp4 sp dp2 zero1 eager fp32
# tensor and sequence parallelism
llama-3-8b:4 s8192 tp8 dp8 zero3
llama-3-8b:4 s8192 tp8 sp dp8 zero3
llama-3-8b:4 s8192 tp8 sp dp8 zero3 full
llama-3-8b:4 s8192 tp2 sp b2
llama-3-8b:4 s8192 tp4 dp4 zero1 m4 selective
llama-3-8b:4 s8192 tp4 sp dp4 zero2 m4 fp32
# context parallelism
llama-3-8b:4 s32768 cp4 dp2 zero3
llama-3-8b:4 s32768 cp4 ulysses dp2 zero3
llama-3-8b:4 s32768 cp4 allgather dp2 zero3
llama-3-8b:4 s131072 cp16 tp8 sp zero3 full
llama-3-8b:4 s65536 cp8 tp8 sp zero1 m2
llama-3-8b:4 s32768 cp8 ulysses dp2 zero2 m2 full
llama-3-8b:4 s8192 cp2 b4 fp32
# pipelines
llama-3-8b:16 s8192 tp2 pp4 m8
llama-3-8b:16 s8192 tp2 sp pp4 m8 dp4 zero1
llama-3-8b:16 s8192 tp2 sp pp4 m8 dp4 zero2 full
llama-3-8b:16 s4096 pp4 m8 gpipe
llama-3-8b:16 s8192 pp4 m8 v2 interleaved_1f1b
llama-3-8b:16 s8192 pp4 m8 v2 interleaved_1f1b dp4 zero1
llama-3-8b:16 s8192 pp4 m8 zero_bubble
llama-3-8b:16 s8192 pp4 m8 v2 interleaved_zero_bubble
llama-3-8b:16 s8192 pp4 m8 v2 zbv
llama-3-8b:16 s8192 pp4 m8 v2 dualpipev tp2 sp
llama-3-8b:16 s8192 pp4 m16 dp2 zero3 full
llama-3-8b:16 s2048 pp4 m4 fp32 b2
# sizes
llama-3.2-1b s4096 b2
llama-3.2-1b s4096 dp8 zero2 m2
llama-3.2-1b s4096 tp2 sp pp2 m4
llama-3.2-3b:8 s4096 dp8 zero3
tinyllama-1.1b s2048 b4 dp2
tinyllama-1.1b s2048 b4 dp2 zero1 m2
smollm2-135m s2048 b4 dp8
smollm2-135m s512 b4 dp8 zero1 m4
llama-2-13b:8 s4096 dp16 zero3
llama-3-70b:4 s8192 tp8 sp dp64 zero3 full
llama-3-70b:8 s8192 tp8 sp pp4 dp8 zero1 m8 full
llama-3-70b:4 s8192 tp8 dp8 zero1 m4
llama-3.1-405b:2 s8192 tp8 sp dp128 zero3 full
llama-3.1-405b:8 s8192 tp8 sp pp4 dp16 zero1 m16
llama-3.1-405b:4 s131072 tp8 sp cp16 dp4 zero3 full
llama-2-70b:4 s4096 dp256 zero3 full
# other dense decoders
mistral-7b-v0.3:4 s8192 dp8 zero3
mistral-7b:4 s8192 dp8 zero3
qwen2.5-0.5b s4096 dp4 b2
qwen2.5-7b:4 s4096 dp8 zero2 m2
qwen2.5-72b:4 s4096 tp8 sp dp16 zero3 full
qwen3-0.6b s4096 dp4 zero1 m2
qwen3-4b:6 s4096 tp4 dp2 zero3
qwen3-32b:6 s4096 tp4 sp pp2 m4 dp4 zero1
gemma-2b:6 s4096 dp8 zero3
gemma-2-9b:6 s4096 dp8 zero3 b2
gemma-2-27b:4 s8192 tp8 sp dp4 zero3 full
gemma-2-2b:6 s4096 eager b2
gemma-3-1b s2048 dp4 zero1 m2
gpt2 s1024 b8
gpt2-xl:8 s1024 b4 dp4 zero1 m2
gpt2-xl:8 s1000 b4 tp5 sp
gpt2-medium s1024 b8 dp2 zero2 m2 eager fp32
opt-6.7b:4 s2048 dp4 zero3 b2
opt-13b:4 s2048 tp4 pp2 m4
gpt-neox-20b:4 s2048 tp8 dp8 zero1 m2
pythia-1b s2048 dp4 b4 zero2 m2
phi-2:6 s2048 dp4 zero3 b2
phi-3-mini:6 s4096 tp4 sp dp2 zero1 m2
olmo-2-7b:4 s4096 dp8 zero3
olmo-2-13b:4 s4096 tp4 sp dp2 zero1
starcoder2-7b:4 s8192 dp8 zero3
command-r:4 s4096 tp8 dp8 zero3
glm-4-9b:4 s8192 tp2 dp8 zero1 m2
granite-3.0-8b:4 s4096 dp8 zero3 full
smollm3-3b:4 s4096 dp8 zero3
# mixtures of experts
mixtral-8x7b:2 s2048 dp4 zero2 m2
mixtral-8x7b:2 s4096 dp8 ep8 zero1
mixtral-8x7b:2 s4096 dp8 ep8 zero1 m4
mixtral-8x7b:2 s4096 dp16 ep8 zero3
mixtral-8x7b:2 s4096 dp16 ep8 zero3 m2 full
mixtral-8x7b:2 s4096 tp4 sp dp4 ep4 zero1
mixtral-8x22b:2 s4096 tp8 sp dp8 ep8 whole-experts zero1
mixtral-8x7b:4 s4096 dp8 ep8 zero1 pp2 m4
qwen3-30b-a3b:3 s2048 dp8 ep8 zero1
qwen3-30b-a3b:3 s2048 dp8 ep8 zero1 m4
qwen3-30b-a3b:3 s4096 dp16 ep8 zero2 m2
qwen3-30b-a3b:3 s4096 dp16 ep4 zero3
qwen3-30b-a3b:3 s4096 dp8 zero3
qwen3-235b-a22b:3 s4096 tp4 sp dp16 ep16 zero1 full
olmoe-1b-7b:3 s4096 dp8 ep8 zero1 b2
qwen1.5-moe-a2.7b:3 s4096 dp4 ep4 zero2 m2
deepseek-v3:5 s4096 dp64 ep64 zero1
deepseek-v3:5 s4096 dp64 ep32 zero1 m4
deepseek-v3:5 s4096 tp4 sp dp32 ep32 zero1 full m2
deepseek-v3:6 s4096 dp64 ep32 zero1 pp2 m4
deepseek-v3:5 s4096 dp128 ep64 zero3
gpt-oss-20b:4 s4096 dp8 ep8 zero1
gpt-oss-20b:4 s2048 dp8 zero3
# encoders, encoder and decoder
bert-base s512 b16 dp4
bert-large s512 b16 dp4 zero1 m2
bert-large s512 b8 dp2 zero3 eager
bert-large:8 s512 b16 tp4 sp
t5-3b:4 s512 b8 dp8
t5-3b:4 s512 b8 dp8 zero2 m2
t5-large:6 s512 b8 dp8 zero3
t5-large:4 s512 b8 dp2 eager
t5-large:4 s512 b8 dp2 full m2
t5-large:4 s512 b8 tp4 sp pp2 m4
t5-large:4 s512 b4 dp2 zero3 selective eager
# adapters
llama-3-8b:4 s4096 lora:16 dp2
llama-3-8b:4 s4096 lora:64 full m2
llama-3-8b:4 s4096 qlora:16
llama-3-8b:4 s4096 qlora:16 full b2 m2
llama-2-70b:3 s2048 qlora:64 full
llama-3-70b:3 s8192 lora:16 tp8 sp dp2 zero1
llama-3-8b:4 s1024 b4 pp2 m4 full qlora:16
olmo-2-7b:4 s1024 b2 pp2 m4 full lora:16
opt-1.3b:4 s1024 b4 pp2 m4 full lora:16
bert-large:8 s512 b8 pp2 m4 full lora:16
t5-large:4 s512 b8 pp2 m4 full lora:16
llama-3-8b:4 s1024 b4 pp2 m4 zero_bubble lora:16
# frozen parts
llama-3-8b:4 s4096 dp2 zero2 m2 freeze=embedding,layers:0-1
llama-3-8b:4 s4096 tp4 sp dp2 zero1 freeze=embedding,layers:0-1
llama-3-8b:8 s4096 pp2 m4 freeze=embedding,layers:0-1
mixtral-8x7b:2 s4096 dp8 ep8 zero1 freeze=embedding,layers:0-0
qwen3-0.6b s2048 dp2 freeze=norms
olmo-2-7b:4 s2048 tp2 pp2 m2 freeze=norms,layers:1-1
# offload
llama-3-8b:4 s8192 dp8 zero3 offload=activations
llama-3-8b:6 s8192 dp8 zero3 full offload=activations
llama-3-8b:8 s4096 dp4 zero1 pp2 m4 offload=activations
llama-3-8b:8 s4096 dp2 zero1 pp2 m4 v2 interleaved_1f1b offload=activations
llama-2-13b:5 s8192 dp8 zero2 m2 offload=activations
llama-2-13b:5 s8192 tp2 dp2 zero1 offload=activations
gpt2-xl:6 s1024 b8 dp2 zero1 offload=activations
mixtral-8x7b:3 s4096 dp8 ep8 zero1 offload=activations
gemma-2-2b:4 s4096 dp4 zero3 selective offload=activations
bert-large:4 s512 b16 dp4 zero2 offload=activations
qwen3-0.6b:5 s2048 qlora:8 offload=activations
llama-3-8b:4 s2048 dp4 zero1 m2 offload=optimizer
llama-3-8b:4 s2048 dp4 zero3 offload=optimizer+activations
llama-3-8b:4 s2048 dp4 zero2 m2 fp32 offload=optimizer
mixtral-8x7b:2 s2048 dp8 ep8 zero1 offload=optimizer
qwen3-0.6b:5 s2048 lora:8 offload=optimizer
# modules that are computed again
mixtral-8x7b:2 s2048 dp8 ep8 zero1 modules:moe
mixtral-8x7b:2 s2048 dp8 ep8 zero1 modules:moe_act
mixtral-8x7b:2 s2048 dp8 ep8 zero1 modules:layernorm+moe
qwen3-30b-a3b:3 s2048 dp8 ep8 zero1 modules:moe_act
qwen3-30b-a3b:3 s2048 dp8 ep8 zero1 ops:every-2nd-mm
gpt-oss-20b:2 s2048 dp8 ep8 zero1 modules:moe
qwen1.5-moe-a2.7b:2 s2048 dp4 ep4 zero1 modules:shared_experts
deepseek-v3:5 s4096 dp64 ep64 zero1 modules:mla_up_proj
deepseek-v3:5 s4096 dp64 ep64 zero1 modules:mla_up_proj+moe
deepseek-v3:5 s4096 dp64 ep64 zero1 modules:mla_up_proj+shared_experts+moe_act
deepseek-v3:5 s4096 tp4 sp dp32 ep32 zero1 modules:mla_up_proj+layernorm+moe
llama-3-8b:4 s4096 dp4 zero3 modules:layernorm+mlp
# short sequences: the reduction of large blocks is the peak
llama-3-8b:2 s256 dp4 m2
llama-3-8b:4 s256 dp8 zero1 m2
llama-3-8b:4 s256 dp16 copies4 zero1 m2
mixtral-8x7b:2 s1024 dp4 ep4
mixtral-8x7b:2 s1024 dp4 ep4 m2
mixtral-8x7b:2 s1024 dp8 ep4 m2
qwen1.5-moe-a2.7b:2 s1024 dp4 ep4 m2
llama-3-8b:4 s512 dp4 pp2 m4
# small models
gpt2 s128 b2
gpt2:2 s64 b2
smollm2-135m:4 s256 lora:4
smollm2-135m:4 s256 b4 m2 lora:4
qwen3-0.6b:4 s1024 lora:16 modules:mlp
# documents of one sequence that do not see each other
llama-3-8b:4 s4096 dp8 zero3 documents
# found later, at the end: ``--quick`` takes every seventh
llama-3-8b:4 s2048 dp4 m2 fp32
llama-3.2-1b s2048 dp4 m3 full fp32
llama-3.2-1b s2048 dp4 zero1 m3 full fp32
opt-1.3b:4 s1024 b4 pp4 m4 lora:16
gemma-2-2b:4 s2048 lora:16 dp2
gemma-2-9b:2 s1024 lora:16 modules:mlp
llama-3.2-1b:4 s256 qlora:4
llama-3.2-1b:4 s256 freeze=embedding,head dp2 zero3
"""


def lines() -> list[str]:
    """Return the cases as lines, without the headings."""
    found = [line.strip() for line in MATRIX.splitlines()]
    return [line for line in found if line and not line.startswith("#")]
