"""Trains the checkpoint that jattn ships, from the standard library's sources to the finished folder."""

import argparse
import json
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from training.bpe import encode_document, join_documents, train_tokenizer
from training.card import model_card
from training.checkpoint_files import CONFIG, tensor_shapes, write_checkpoint
from training.corpus import Corpus, read_corpus
from training.evaluation import figures, mean_nats, nats_by_file
from training.network import Network
from training.optimisation import Trainer
from training.sampling import sample_text

PROMPTS = ('"""Tools for ', "import os\nimport sys\n\n\ndef ", "class Queue:\n", "    def test_", "# Copyright ")
TEMPERATURE = 0.7


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument(
        "--stdlib", type=pathlib.Path, help="sources to learn from, of a Python like this one; its own by default"
    )
    parser.add_argument("--steps", type=int, default=9000)
    parser.add_argument("--batch", type=int, default=16, help="windows a step")
    parser.add_argument("--window", type=int, default=CONFIG["max_position_embeddings"], help="tokens a window")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its peak")
    parser.add_argument("--weight-decay", type=float, default=1.0)
    parser.add_argument("--token-noise", type=float, default=0.15, help="share of input tokens replaced at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chunk", type=int, default=100, help="steps a compiled call")
    parser.add_argument("--smoke", action="store_true", help="a few steps on a sliver of the corpus, on any machine")
    options = parser.parse_args()
    if options.smoke:
        options.steps, options.batch, options.window, options.chunk = 4, 2, 64, 2
    if options.steps % options.chunk:
        parser.error(f"--steps must be a multiple of --chunk. Got {options.steps} and {options.chunk}.")
    return options


def sliver(corpus: Corpus) -> Corpus:
    """A few small files of each split."""

    def few(texts: dict[str, str]) -> dict[str, str]:
        return dict([(name, text) for name, text in texts.items() if 2000 < len(text) < 8000][:4])

    return Corpus(few(corpus.train), few(corpus.validation), few(corpus.held_out))


def main() -> None:
    options = arguments()
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    corpus = read_corpus(options.stdlib)
    corpus = sliver(corpus) if options.smoke else corpus
    texts = {"train": corpus.train, "validation": corpus.validation, "held_out": corpus.held_out}
    tokenizer = train_tokenizer(corpus.train.values())
    documents = {
        split: {name: encode_document(tokenizer, text) for name, text in files.items()}
        for split, files in texts.items()
    }
    stream = join_documents(documents["train"].values())
    say(f"{jax.devices()[0].device_kind}; {len(stream):,} training tokens")

    network = Network.first(options.seed)
    trainer = Trainer(
        network=network,
        stream=jnp.asarray(stream),
        steps=options.steps,
        batch=options.batch,
        window=options.window,
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        token_noise=options.token_noise,
        vocab_size=CONFIG["vocab_size"],
        seed=options.seed,
    )

    def nats(parameters, split: str) -> dict[str, float]:
        row_losses = network.row_losses(network.rounded(parameters))
        return nats_by_file(row_losses, documents[split], options.window, rows=options.batch)

    state, validation = trainer.first(), float("nan")
    for done in range(options.chunk, options.steps + 1, options.chunk):
        state, losses = trainer.run(state, options.chunk)
        message = f"step {done}/{options.steps}  train {float(np.mean(losses)):.4f}"
        if done % (10 * options.chunk) == 0 or done == options.steps:
            validation = mean_nats(nats(state.parameters, "validation"), documents["validation"])
            message += f"  validation {validation:.4f} nats a token"
            write_checkpoint(options.out, tokenizer, network.tensors(state.parameters))
        say(message)
    minutes = (time.monotonic() - started) / 60

    report = figures(nats(state.parameters, "held_out"), documents, texts, CONFIG["vocab_size"])
    report["validation_nats_per_token"] = round(validation, 4)
    report["window"] = options.window
    (options.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    logits_of = network.logits(network.rounded(state.parameters))
    samples = [
        sample_text(logits_of, tokenizer, prompt, num_tokens=options.window // 4, temperature=TEMPERATURE, seed=seed)
        for seed, prompt in enumerate(PROMPTS[:1] if options.smoke else PROMPTS)
    ]
    tokens_per_step = options.batch * options.window
    card = model_card(
        figures=report,
        config=CONFIG,
        samples=samples,
        parameters=sum(int(np.prod(shape)) for shape in tensor_shapes().values()),
        python="{}.{}".format(*sys.version_info),
        window=options.window,
        steps=options.steps,
        tokens_per_step=tokens_per_step,
        epochs=options.steps * tokens_per_step / len(stream),
        learning_rate=options.learning_rate,
        weight_decay=options.weight_decay,
        token_noise=options.token_noise,
        seed=options.seed,
        minutes=minutes,
        device=jax.devices()[0].device_kind,
        temperature=TEMPERATURE,
    )
    (options.out / "README.md").write_text(card, encoding="utf-8")
    say(json.dumps({"held_out": report["held_out"], **report["baselines"]}))


if __name__ == "__main__":
    main()
