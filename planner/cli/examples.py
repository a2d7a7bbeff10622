"""Examples at the end of the help of every command; tests run them in this order."""

from __future__ import annotations

from typing import Final

EXAMPLES: Final = {
    "": (  # of the program itself
        "shardplan fit llama-3-8b 8xA100-80GB --seq-len 8192",
        "shardplan plan llama-3-8b 8xH100-SXM --global-batch-size 64",
    ),
    "fit": (
        "shardplan fit llama-3-8b 8xA100-80GB --seq-len 8192",
        "shardplan fit llama-2-70b 8xA100-40GB --lora 16 --tp 8",
    ),
    "plan": (
        "shardplan plan llama-3-8b 8xH100-SXM --seq-len 8192 -o plan.json",
        "shardplan plan llama-3-8b 8xH100-SXM,16xL40S --fix pp=1 --objective cost",
    ),
    "explain": (
        "shardplan explain plan.json",
        "shardplan explain plan.json --why-not tp=2",
    ),
    "validate": (
        "shardplan validate --time --only megatron-sc21",
        "shardplan validate RUNS.csv -o results",
    ),
    "models": ("shardplan models", "shardplan models qwen3-32b"),
    "hardware": ("shardplan hardware H100", "shardplan hardware H100-SXM-80GB --json"),
    "software": ("shardplan software", "shardplan software megatron"),
    "replan": (
        "shardplan replan plan.json --gpus 4 -o four.json",
        "shardplan replan plan.json --gpus 6 -o six.json --json",
    ),
    "launch": (
        "shardplan launch plan.json --on slurm --dry-run",
        "shardplan launch plan.json --on slurm --elastic --dry-run -o job.sbatch -- --steps 100",
    ),
    "compare": ("shardplan compare plan.json four.json", "shardplan compare plan.json runs/first"),
    "compare-techniques": (
        "shardplan compare-techniques llama-3-8b 2x8xA100-80GB --global-batch-size 64",
        "shardplan compare-techniques gpt2-xl 8xA100-40GB --seq-len 1024 --json",
    ),
    "report": (
        "shardplan report plan.json -o report.html",
        "shardplan report runs/first -o report.html --force",
    ),
    "trace": (
        "shardplan trace plan.json -o trace.json",
        "shardplan trace runs/first -o trace.json --force",
    ),
    "doctor": ("shardplan doctor", "shardplan doctor --json"),
    "completion": (
        "shardplan completion bash >> ~/.bash_completion",
        "shardplan completion fish > ~/.config/fish/completions/shardplan.fish",
    ),
    "serve": (
        "shardplan serve",
        "shardplan serve --port 9000",
    ),
    "learn": (
        "shardplan learn RUNS.csv -o my-trainer.toml",
        "shardplan learn RUNS.csv -o my-trainer.toml --force --json",
    ),
    "observe": (
        "shardplan observe train.log --cluster 8xH100-SXM -o RUNS.csv",
        "shardplan observe train.log --model llama-3-8b --cluster 8xH100-SXM --seq-len 8192",
    ),
    "oom": (
        "shardplan oom error.txt",
        "shardplan oom error.txt --model llama-3-8b --cluster 8xA100-80GB --zero 3 --mbs 4",
    ),
    "calibrate": (
        "shardplan calibrate --processes 2",
        "shardplan calibrate --from runs/first -o cluster.toml",
    ),
}
