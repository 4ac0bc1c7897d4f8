"""Options of llama.cpp's programs that are not here, so that whoever types one reads what it is and what there is in its place.

Options that are here too are not listed: `options.py` names them as llama.cpp does. Removed options of llama.cpp are.
"""

from __future__ import annotations

from dataclasses import dataclass

_OUT = "leave it out"
_NO_DRAFT = "there is no speculative decoding yet"
_NO_SAMPLER = "there is no such sampler; --top-k, --top-p, --min-p, --temp and --repeat-penalty are there"
_NO_SERVER = "there is no server; use the Python interface in one"
_FROM_FILE = "the model's file says how its positions are scaled"
_NO_ADAPTER = "adapters are not there; use a model that they are merged into"
_NO_EXPERTS = "models with experts do not run yet"
_NO_IMAGES = "there are no images nor sound, text alone"
_DEVICES = "every tensor is divided over all of --device"
_THREADS = "--threads says how many; taskset and numactl choose cores and memory"
_LINES = "messages go to standard error, -v and -vv say more"
_NAME = "the model is the first argument: a file, a known name, or hf:owner/repo/file.gguf with the extra hf"
_TEMPLATE = "the template of the model's file is always used, as it is"
_MEASURE = "Model.perplexity in Python measures a text"

# Names, what they are, what there is here.
_TABLE: tuple[tuple[str, str, str], ...] = (
    ("-m --model", "the model", 'the model is the first argument, as in: generate model.gguf "text"'),
    ("-mu --model-url -dr --docker-repo", "where a model is fetched from", _NAME),
    ("-hf -hfr --hf-repo -hff --hf-file -hft --hf-token", "a model on Hugging Face", _NAME),
    ("-a --alias --models-dir --offline -cl --cache-list", "names of models", _NAME),
    # ---- devices
    ("-ngl --gpu-layers --n-gpu-layers", "layers on the GPU", f"all layers are on the devices of --device, as in --device cuda:0; {_OUT}"),
    ("-sm --split-mode", "how a model is divided", f"{_DEVICES}, in the parts of --tensor-split; {_OUT}"),
    ("-mg --main-gpu", "the main GPU", f"no device is the main one: {_DEVICES}; {_OUT}"),
    ("-fit --fit -fitt --fit-target -fitc --fit-ctx",
     "fitting a model to memory", "use --device, --tensor-split and --ctx-size; `plan` shows bytes"),
    ("-ot --override-tensor", "where single tensors lie", f"{_DEVICES}; {_OUT}"),
    ("-cmoe --cpu-moe -ncmoe --n-cpu-moe -otd --override-tensor-draft", "where experts lie", _NO_EXPERTS),
    ("-kvo --kv-offload", "a KV cache on the devices", f"it lies there unless --no-kv-offload says otherwise; {_OUT}"),
    ("--low-vram -nopo --no-op-offload --op-offload", "what is not computed on the GPU", "see --no-kv-offload for the cache"),
    ("--list-devices", "a list of devices", "`numba-meta devices` shows them"),
    ("--rpc -rpc", "devices of other hosts", "ranks hold a model together: `numba-meta launch`, or mpirun for several hosts"),
    ("-fa --flash-attn", "flash attention", f"attention is computed in one way only; {_OUT}"),
    ("--mlock --mmap --no-mmap -mmp --no-host -nr --no-repack --repack --check-tensors",
     "how weights are read", f"weights are copied to their devices; {_OUT}"),
    ("-mmq --mul-mat-q -nommq --no-mul-mat-q --memory-f32 --swa-full",
     "how products and cache are computed", "see --exact, --cache-type-k and --cache-type-v"),
    ("--numa -C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll", "which cores are used", _THREADS),
    ("-tb --threads-batch", "threads for prompts", "--threads are those of prompts and of generation"),
    ("-Cb --cpu-mask-batch -Crb --cpu-range-batch --cpu-strict-batch --prio-batch --poll-batch --threads-http",
     "threads for prompts", _THREADS),
    ("--override-kv", "other metadata than the file's", "the file's are used; change the file"),
    # ---- context and sequences
    ("-cb --cont-batching -nocb --no-cont-batching -ns --sequences",
     "batches", "several prompts of one `generate` are always decoded together"),
    ("-dt --defrag-thold --cache-reuse --cache-prompt --no-cache-prompt -cram --cache-ram --ctx-checkpoints --swa-checkpoints",
     "how a server's cache is kept", "see --prompt-cache, and reuse_prefix in Python"),
    ("--prompt-cache-all", "text beside the prompt in the cache", f"--prompt-cache keeps the text too; {_OUT}"),
    ("--prompt-cache-ro", "a cache that is not written", "--prompt-cache leaves the new state in its file; give it a copy"),
    ("--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale -gqa -eps", "how positions are scaled", _FROM_FILE),
    ("--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast",
     "YaRN", _FROM_FILE),
    ("-gan --grp-attn-n -gaw --grp-attn-w", "self-extend", "it is not there; see --context-shift"),
    # ---- prompts and conversations
    ("-e --escape --no-escape", "escapes in prompts", f"a prompt is taken as it is: write line breaks into --file; {_OUT}"),
    ("-cnv --conversation -i --interactive -if --interactive-first -ins --instruct -cml --chatml -mli --multiline-input --simple-io",
     "a conversation", "that is `numba-meta chat`"),
    ("-no-cnv --no-conversation", "no conversation", f"`generate` continues a text, as it is; {_OUT}"),
    ("-st --single-turn", "one question", "that is `generate --chat`"),
    ("-r --reverse-prompt --antiprompt", "a text that stops", "that is --stop, and ends the answer"),
    ("--in-prefix --in-prefix-bos --in-suffix --no-prefill-assistant", "what stands around messages", _TEMPLATE),
    ("--jinja --no-jinja --chat-template --chat-template-file --chat-template-kwargs --reasoning-format --reasoning-budget",
     "the chat template", _TEMPLATE),
    ("-sysf --system-prompt-file", "the system message's file", "that is --system TEXT of `chat`"),
    ("-bf --binary-file --in-file --context-file", "files of prompts", "that is --file, of UTF-8 text"),
    ("-co --color --display-prompt --no-display-prompt --verbose-prompt -ptc --print-token-count",
     "how text is shown", f"text is shown as it is, without the prompt; {_OUT}"),
    ("-sp --special", "control tokens in the text", "they are not shown; Model.generate_ids in Python has their ids"),
    ("--warmup --no-warmup --perf --no-perf",
     "runs that warm up, and figures", f"nothing is run to warm up, and the last line has speeds; {_OUT}"),
    ("--spm-infill --infill --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default", "infill", "it is not there"),
    # ---- sampling
    ("--samplers --sampling-seq --sampler-seq --top-nsigma --top-n-sigma --typical --tfs --xtc-probability --xtc-threshold",
     "samplers", _NO_SAMPLER),
    ("--presence-penalty --frequency-penalty --dry-multiplier --dry-base --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker",
     "penalties", _NO_SAMPLER),
    ("--dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent --adaptive-target --adaptive-decay",
     "other temperatures", _NO_SAMPLER),
    ("--penalize-nl --no-penalize-nl -l --logit-bias --n-probs -bs --backend-sampling", "other rules of choice", _NO_SAMPLER),
    ("--cfg-negative-prompt --cfg-negative-prompt-file --cfg-scale", "guidance", "it is not there"),
    ("--grammar --grammar-file -j --json-schema -jf --json-schema-file", "a grammar", "text is not held to a grammar"),
    # ---- a second model
    ("-md --model-draft -mdraft -hfd -hfrd --hf-repo-draft --spec-type --spec-replace", "a draft model", _NO_DRAFT),
    ("--draft --draft-n --draft-max --draft-min --draft-n-min --draft-p-min --draft-p-split", "drafting", _NO_DRAFT),
    ("-ngld --gpu-layers-draft --n-gpu-layers-draft -devd --device-draft -cd --ctx-size-draft", "where a draft model lies", _NO_DRAFT),
    ("-td --threads-draft -tbd --threads-batch-draft -ctkd --cache-type-k-draft -ctvd --cache-type-v-draft", "a draft model", _NO_DRAFT),
    ("-cmoed --cpu-moe-draft -ncmoed --n-cpu-moe-draft", "a draft model", _NO_DRAFT),
    ("-lcs --lookup-cache-static -lcd --lookup-cache-dynamic", "lookup decoding", _NO_DRAFT),
    ("--lora --lora-scaled --lora-base --lora-init-without-apply", "LoRA adapters", _NO_ADAPTER),
    ("--control-vector --control-vector-scaled --control-vector-layer-range", "control vectors", _NO_ADAPTER),
    ("-mm --mmproj -mmu --mmproj-url --no-mmproj --mmproj-auto --no-mmproj-auto --mmproj-offload --no-mmproj-offload",
     "images", _NO_IMAGES),
    ("--image --audio --image-min-tokens --image-max-tokens -mv --model-vocoder -hfv --hf-repo-v --tts-speaker-file",
     "images and sound", _NO_IMAGES),
    # ---- other programs of llama.cpp
    ("--host --port --path --api-prefix --api-key --api-key-file --ssl-key-file --ssl-cert-file -to --timeout", "a server", _NO_SERVER),
    ("--metrics --slots --no-slots --props --slot-save-path -sps --slot-prompt-similarity --webui --no-webui", "a server", _NO_SERVER),
    ("--embedding --embeddings -embd --pooling --attention --embd-normalize --rerank --reranking", "embeddings", "there are no embeddings"),
    ("--perplexity -ppl --chunks --ppl-stride --ppl-output-type --kl-divergence --save-all-logits --all-logits", "perplexity", _MEASURE),
    ("--hellaswag --hellaswag-tasks --winogrande --winogrande-tasks --multiple-choice --multiple-choice-tasks", "scores", _MEASURE),
    ("-pg --progress --delay -oe --output-err", "options of llama-bench", "see --n-prompt, --n-gen, --n-depth and --output of `bench`"),
    ("--log-disable --log-file --log-colors --log-prefix --log-timestamps --log-verbose -ld --logdir", "a log", _LINES),
    ("-lv --verbosity --log-verbosity", "how much is logged", _LINES),
    ("--usage --license --completion-bash", "help", "see --help"),
)  # fmt: skip


@dataclass(frozen=True)
class LlamaOption:
    """An option of llama.cpp: what it is, and what there is here in its place."""

    what: str
    instead: str


LLAMA_OPTIONS = {name: LlamaOption(what, instead) for names, what, instead in _TABLE for name in names.split()}


def hint(name: str) -> str | None:
    """A line about an option of llama.cpp; None for one that it does not have."""
    option = LLAMA_OPTIONS.get(name)
    return None if option is None else f"{name} ({option.what}) is an option of llama.cpp that is not here: {option.instead}."
