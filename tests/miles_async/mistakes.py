"""Mistakes that newcomers make, a folder in which they can be made, and the process that is asked: for the test and the bench."""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
WEIGHTS = struct.pack("<Q", len(HEADER)) + HEADER + bytes(16)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
TOKENIZER = json.dumps(
    {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"1+1=": 0, "2": 1, "?": 2}, "unk_token": "?"}}
)
GOOD = (
    "--hf-checkpoint model --prompt-data d.jsonl --input-key q --label-key a --num-rollout 2 --rollout-batch-size 2 --rm-type math"
)
EVAL = "--eval-interval 1 --eval-prompt-data"
OWN = "--rm-type none --custom-rm-path"
MISTAKES = {
    # models
    "--hf-checkpoint nope": ("hf_checkpoint = 'nope': no such directory (looked in", "Give a downloaded Hugging Face directory"),
    "--hf-checkpoint d.jsonl": ("hf_checkpoint = 'd.jsonl': not a directory", "Give a downloaded Hugging Face directory"),
    "--hf-checkpoint cut": ("hf_checkpoint = 'cut': model.safetensors is cut: it has", "Download it again."),
    "--hf-checkpoint lfs": ("hf_checkpoint = 'lfs': tokenizer.json is a pointer of Git LFS", "Download it again."),
    "--hf-checkpoint cut_tokenizer": ("tokenizer.json is cut or no JSON", "Download it again."),
    "--hf-checkpoint empty": ("the directory has no config.json", "Give a directory with config.json"),
    "--hf-checkpoint no_tokenizer": ("the directory has no tokenizer.json", "Give a directory with config.json, tokenizer.json"),
    "--hf-checkpoint bad_config": ("config.json cannot be read", "Correct it, or download the model again."),
    "--hf-checkpoint pickled": ("no *.safetensors in it, and pytorch_model.bin is not read", "save it as safetensors"),
    "--hf-checkpoint builtin:nope": ("no such builtin model", "Builtin models: builtin:arithmetic"),
    "--ref-load nope --use-kl-loss": ("no such directory (looked in", "Give a downloaded Hugging Face directory"),
    "--hf-checkpoint Some/Model": ("hf_checkpoint = 'Some/Model': no such directory here", "hf download Some/Model"),
    # data
    "--prompt-data none.jsonl": ("prompt_data = 'none.jsonl': no such file (looked in", "Give the path of a data set."),
    "--prompt-data d.tsv": (".tsv is not a known data format", "Give a .jsonl, .json, .csv"),
    "--prompt-data bad.jsonl": ("bad.jsonl, line 2, is not JSON", "Each line must be one JSON object."),
    "--prompt-data list.jsonl": ("list.jsonl, line 1, is not a JSON object", "Each line must be one."),
    "--prompt-data latin.jsonl": ("latin.jsonl, line 1, is not UTF-8 text", "Save the file as UTF-8."),
    "--prompt-data zero.jsonl": ("zero.jsonl holds no rows", "A run needs at least one prompt."),
    "--prompt-data bad.parquet": ("bad.parquet is not a Parquet file", "Download or write it again."),
    "--prompt-data none.csv@[0:x]": ("not a slice", "Write path@[a:b] with whole numbers."),
    "--prompt-data d.jsonl@[9:12]": ("d.jsonl selects none of the 4 rows", "A run needs at least one prompt."),
    "--prompt-data chat.jsonl": ("the prompt is a list", "set --apply-chat-template"),
    "--prompt-data numbers.jsonl": ("the prompt is a int", "Set --input-key."),
    "--prompt-data some/data": ("prompt_data = 'some/data': no such file here", "hf download some/data --repo-type dataset"),
    "--num-rollout none --num-epoch 1 --rollout-batch-size 32": ("1 epochs of 4 prompts do not fill one rollout", "at most 4"),
    # columns and labels
    "--input-key question": ("has no key 'question'", "input_key = 'question'"),
    "--label-key answer": ("label_key = 'answer'", "has no key 'answer'"),
    "--metadata-key meta": ("metadata_key = 'meta'", "has no key 'meta'"),
    "--prompt-data nolabel.jsonl": ("none of the first 4 rows of nolabel.jsonl has a label", "Name another column"),
    # rewards
    "--rm-type maths": ("rm-type = 'maths'", "Did you mean math?"),
    "--rm-type none": ("rm_type = (unset): nothing scores the samples", "--custom-rm-path FILE.py:NAME"),
    f"{OWN} r.py:scor": ("r.py has no function scor", "Did you mean score?"),
    f"{OWN} r.py": ("custom_rm_path = 'r.py': it names no function", "Write r.py:score."),
    f"{OWN} none.py:score": ("no such file none.py (looked in", "Write FILE.py:NAME."),
    f"{OWN} broken.py:score": ("broken.py, line 1:", "Correct it."),
    f"{OWN} needs.py:score": ("needs.py, line 1 imports nosuchmodule", "pip install nosuchmodule"),
    f"{OWN} nomodule.score": ("no package nomodule (looked in", "Write FILE.py:NAME or PACKAGE.MODULE.NAME"),
    # templates
    "--chat-template-path none.jinja --apply-chat-template": ("chat_template_path = 'none.jinja': no such file", "Jinja"),
    "--apply-chat-template": ("apply_chat_template = true: model has no chat template", "--chat-template-path FILE"),
    "--tools calculator": ("tools = ['calculator']: the chat template shows them", "Add --apply-chat-template."),
    # held-out data
    "--eval-interval 5": ("eval_interval = 5: eval_prompt_data is empty", "Set --eval-prompt-data NAME PATH."),
    f"{EVAL} held none.jsonl": ("eval_prompt_data = 'none.jsonl': no such file", "Give the path of a data set."),
    f"{EVAL} held d.jsonl --eval-input-key Q": ("eval_input_key = 'Q'", "Set --eval-input-key."),
    "--eval-interval 1 --eval-config none.toml": (
        "eval_config = 'none.toml': no such file (looked in",
        "Give a TOML or YAML file.",
    ),
    "--eval-interval 1 --eval-config e.toml": ("data set x: Object missing required field `path`", "has name and path"),
    # GPUs, folders, ports, addresses
    "--colocate --engine sglang": ("colocate = true: trainer and engines would take turns on a GPU", "Leave it out"),
    "--runs-dir d.jsonl": ("d.jsonl is a file, not a folder", "another --runs-dir"),
    "--save d.jsonl": ("d.jsonl is a file, not a folder", "Choose a folder that this user may write."),
    "--console web --console-port 99999": ("--console-port = '99999'", "must be a whole number >= 0 and <= 65535"),
    "--bus-url localhost:6379": ("not an address of a Redis", "Write redis://HOST:PORT/0"),
    "--name a/b": ("name = 'a/b'", "Use letters, digits"),
    "--ckpt-step 5": ("has no checkpoint of that step", "There is no such directory"),
    # flags
    "--rollout-bach-size 4": ("rollout-bach-size", "Did you mean --rollout-batch-size?"),
    "--learning-rate 1e-5": ("--learning-rate is not a flag", "Did you mean --lr?"),
    "--num_generations 8": ("--num_generations is not a flag", "Did you mean --n-samples-per-prompt?"),
    "--rollout-batch-size four": ("--rollout-batch-size = 'four'", "must be a whole number >= 1"),
    "--lr": ("--lr needs a value", "It takes a number"),
    "--num-rollout none": ("the run has no end", "Set --num-rollout N or --num-epoch N."),
    "--rollout-max-response-len 9999": ("the model's context", "Set it to at most"),
    "--n-samples-per-prompt 1": ("of one, every advantage is 0", "Set it to 2 or more"),
    "--max-weight-staleness 3 --no-use-tis": ("off-policy data without a correction", "or set it to 0"),
    "--min-lr 1": ("min_lr = 1.0: above lr", "Set min_lr <= lr."),
    "--debug-train-only": ("it needs batches", "Give --load-debug-rollout-data"),
}
"""Words behind GOOD -> what the line says, and its remedy."""
HUB = ("--hf-checkpoint Some/Model", "--prompt-data some/data")
"""Those for which the client of the Hub is loaded: a second or more."""


class Asked(NamedTuple):
    """`left`: files that were not there before. `cpu_s`: of the process and all that it waited for."""

    status: int
    output: str
    errors: str
    left: list[str]
    cpu_s: float


def make_folder(at: Path) -> Path:
    """A folder with what the mistakes name."""
    row = '{"q": "1+1=", "a": "2"}\n'
    for name in ("model", "cut", "lfs", "cut_tokenizer", "empty", "no_tokenizer", "bad_config", "pickled"):
        (at / name).mkdir()
        if name == "empty":
            continue
        (at / name / "config.json").write_text("{" if name == "bad_config" else '{"max_position_embeddings": 2048}')
        (at / name / "tokenizer_config.json").write_text("{}")
        tokenizer = {"lfs": LFS, "cut_tokenizer": TOKENIZER[:-9].encode()}.get(name, TOKENIZER.encode())
        if name != "no_tokenizer":
            (at / name / "tokenizer.json").write_bytes(tokenizer)
        weights = "pytorch_model.bin" if name == "pickled" else "model.safetensors"
        (at / name / weights).write_bytes(WEIGHTS[:-5] if name == "cut" else WEIGHTS)
    texts = {
        "d.jsonl": row * 4,
        "bad.jsonl": row + "{\n",
        "list.jsonl": "[1]\n" * 4,
        "zero.jsonl": "",
        "numbers.jsonl": '{"q": 7, "a": "2"}\n' * 4,
        "nolabel.jsonl": '{"q": "1+1=", "a": ""}\n' * 4,
        "chat.jsonl": '{"q": [{"role": "user", "content": "1+1="}], "a": "2"}\n' * 4,
        "bad.parquet": "nope",
        "d.tsv": "q\ta\n",
        "r.py": "def score(sample):\n    return 1.0\n",
        "needs.py": "import nosuchmodule\ndef score(sample):\n    return 1.0\n",
        "broken.py": "def score(:\n",
        "e.toml": '[[eval.datasets]]\nname = "x"\n',
    }
    for file, text in texts.items():
        (at / file).write_text(text)
    (at / "latin.jsonl").write_bytes('{"q": "caf\xe9", "a": "2"}\n'.encode("latin-1"))
    return at


def ask(folder: Path, words: str) -> Asked:
    """What `miles-async train` says of a mistake; the last line of its output lists heavy libraries that it loaded."""
    code = (
        "import sys; from miles_async.cli.app import main; status = main(sys.argv[1:]);"
        "print([n for n in ('torch', 'transformers', 'tokenizers', 'aiohttp') if n in sys.modules]); sys.exit(status)"
    )
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "cache"),
    }
    before, used = set(folder.rglob("*")), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *GOOD.split(), *words.split()], cwd=folder, env=env, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    left = sorted(str(one.relative_to(folder)) for one in set(folder.rglob("*")) - before)
    cpu_s = now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime
    return Asked(done.returncode, done.stdout, done.stderr, left, cpu_s)
