"""`terrine prompt`: private prompts for a language model that lies in a local folder or file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from terrine import check, files
from terrine.cli.charging import AccountName, By, LedgerUrl, Purpose, Weak, charging
from terrine.cli.progress import counted
from terrine.errors import InvalidArgument
from terrine.rounding import up

if TYPE_CHECKING:
    from terrine.prompts import LanguageModel, Template

app = typer.Typer(
    name="prompt", help="Prompts learned from private texts: soft ones by DP-SGD, discrete ones by PATE.",
    no_args_is_help=True,
)  # fmt: skip

Model = Annotated[Path, typer.Option(help="A local folder with a Hugging Face model, or a .gguf file.")]
Question = Annotated[str, typer.Option("--template", help=r"The question, with {text} in it; \n is a new line.")]
Words = Annotated[str, typer.Option(help="Label words, by class, separated by commas: ' negative, positive'.")]
Classes = Annotated[
    str | None, typer.Option(help="The labels in the files, by class; default: the words without spaces, or numbers.")
]
Instruction = Annotated[str, typer.Option(help="What a discrete prompt begins with.")]
Seed = Annotated[int | None, typer.Option("--seed", help="For tests only: seeded noise, NOT private.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.command()
def tune(
    model: Model,
    data: Annotated[Path, typer.Option(help="Private texts: .jsonl, .csv, .tsv (text, label) or .txt (label text).")],
    epsilon: Annotated[float, typer.Option(help="The most that may be learned about one text.")],
    out: Annotated[Path, typer.Option(help="The prompt's .safetensors file.")],
    template: Question = "{text}",
    words: Words = "",
    classes: Classes = None,
    delta: Annotated[float | None, typer.Option(help="Default: a power of ten below 1/texts.")] = None,
    start: Annotated[str | None, typer.Option(help="Start from these words; else the vocabulary.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Virtual tokens; default: those of --start, or 10.")] = None,
    head: Annotated[bool, typer.Option("--head", help="Train a small output layer as well.")] = False,
    public: Annotated[
        Path | None, typer.Option(help="Public texts like the private ones: some of them centre the --head.")
    ] = None,
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Start with even answers to empty inputs.")] = False,
    lot: Annotated[int, typer.Option(help="Expected texts in a lot.")] = 256,
    steps: Annotated[int, typer.Option(help="How many steps.")] = 40,
    clip: Annotated[float, typer.Option(help="The bound on one text's gradient.")] = 1.0,
    learning_rate: Annotated[float, typer.Option(help="Relative to the size of the model's token vectors.")] = 0.05,
    test: Annotated[Path | None, typer.Option(help="Texts that need no protection, to measure accuracy.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Go on from here after an interruption.")] = None,
    weak_guarantee: Weak = False,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Train a soft prompt on private texts at a certified epsilon."""
    from terrine import sgd
    from terrine.events import Budget
    from terrine.prompts import SoftPrompt, examples
    from terrine.prompts import tune as train

    asked = _template(template, words, "")
    names = _classes(classes, asked)
    texts, labels = examples.read(data, names) if names else examples.read_pairs(data)
    if test is not None and not names:
        raise InvalidArgument("--test without --words: want label words to measure accuracy by")
    tested = None if test is None else examples.read(test, names)
    failing = _meant(epsilon, delta, len(texts), weak_guarantee)
    plan = sgd.Plan(
        examples=len(texts), lot=min(lot, len(texts)), steps=steps, clip=clip, budget=Budget(epsilon, failing),
        seed=seed,
    )  # fmt: skip
    language = _language(model)
    options: dict[str, Any] = {"head": head, "calibrated": calibrate}
    if public is not None:
        options["public"] = examples.read_texts(public)[:32]
    if start is None:
        begun = SoftPrompt.from_vocabulary(language, asked, 10 if tokens is None else tokens, **options)
    else:
        begun = SoftPrompt.from_text(language, asked, _unescaped(start), count=tokens, **options)
    with (
        charging(ledger, account, by=by, purpose=purpose, usual="PromptDPSGD") as charged,
        counted("steps", quiet=as_json) as progress,
        files.unmade_if_refused(out.parent),
    ):
        _ready(out)
        tuned = train(
            language, begun, texts, labels, plan,
            learning_rate=learning_rate, checkpoint=checkpoint, progress=progress, **charged.told,
        )  # fmt: skip
    tuned.save(out)
    assert tuned.privacy is not None
    shown = {"prompt": str(out), "tokens": tuned.count, **_privacy(tuned.privacy), "noise": plan.noise, "steps": steps}
    if tested is not None:
        shown |= _measured(tuned.log_probabilities, language, *tested, as_json)
    _show(shown, as_json)


@app.command()
def label(
    model: Model,
    private: Annotated[Path, typer.Option(help="Private texts with labels, to be shown to the model.")],
    public: Annotated[Path, typer.Option(help="Public texts to label: .txt (one a line), .jsonl, .csv, .tsv.")],
    epsilon: Annotated[float, typer.Option(help="The most that the labels may tell about one private text.")],
    out: Annotated[Path, typer.Option(help="The labelled public texts: a .jsonl file.")],
    words: Words,
    template: Question = "{text}",
    classes: Classes = None,
    instruction: Instruction = "",
    delta: Annotated[float | None, typer.Option(help="Default: a power of ten below 1/private texts.")] = None,
    teachers: Annotated[int, typer.Option(help="How many disjoint sets of private texts.")] = 100,
    shots: Annotated[int, typer.Option(help="How many of its texts a teacher shows.")] = 4,
    queries: Annotated[int | None, typer.Option(help="Ask only the first so many public texts.")] = None,
    threshold: Annotated[float, typer.Option(help="The share of teachers that must agree.")] = 0.6,
    raw: Annotated[bool, typer.Option("--raw", help="Without contextual calibration.")] = False,
    student: Annotated[Path | None, typer.Option(help="Also choose a prompt of public texts: a .json file.")] = None,
    weak_guarantee: Weak = False,
    ledger: LedgerUrl = None,
    account: AccountName = None,
    by: By = None,
    purpose: Purpose = None,
    seed: Seed = None,
    as_json: AsJson = False,
) -> None:
    """Label public texts by a noisy vote of private prompts; --student chooses a prompt from them."""
    from terrine import pate
    from terrine.events import Budget, Reproducible
    from terrine.prompts import LocalModel, choose, examples, vote
    from terrine.prompts.calibration import CONTENT_FREE
    from terrine.prompts.voting import confident, record
    from terrine.receipts import Payment
    from terrine.rng import SYSTEM, Seeded

    asked = _template(template, words, instruction)
    if not asked.words:
        raise InvalidArgument("--words='': want the words that stand for the classes")
    texts, labels = examples.read(private, _classes(classes, asked))
    offered = examples.read_texts(public)
    unlabelled = offered[:queries]
    failing = _meant(epsilon, delta, len(texts), weak_guarantee)
    rule = confident(Budget(epsilon, failing), teachers=teachers, queries=len(unlabelled), agreement=threshold)
    deal = pate.split(len(texts), teachers, seed=seed or 0)
    backend = LocalModel(_language(model))
    calibration = None if raw else CONTENT_FREE
    check.whole("shots", shots)
    event = rule.event(len(unlabelled))
    with (
        charging(ledger, account, by=by, purpose=purpose, usual="PromptPATE") as charged,
        files.unmade_if_refused(*(path.parent for path in (out, student) if path is not None)),
    ):
        _ready(out, student)
        receipt = Payment(**charged.told).charge(event if seed is None else Reproducible(event))
    with counted("teachers", quiet=as_json) as progress:
        votes = vote(
            backend, asked, list(zip(texts, labels, strict=True)), deal, unlabelled,
            shots=shots, calibration=calibration, progress=progress,
        )  # fmt: skip
    answers = rule.answer(votes, rng=SYSTEM if seed is None else Seeded(seed), receipt=receipt)
    privacy = record(answers, failing, texts=len(texts))
    names = _classes(classes, asked)
    _write_labels(out, unlabelled, answers.labels.tolist(), names)
    shown = {"labels": str(out), "answered": len(answers.answered), "asked": answers.asked, **_privacy(privacy)}
    shown |= {"noise": rule.noise}
    if student is not None:
        with counted("candidates", quiet=as_json) as progress:
            chosen = choose(
                backend, asked, unlabelled, answers.labels,
                shots=shots, unlabelled=offered[len(unlabelled) :][:100], seed=seed or 0, privacy=privacy,
                progress=progress,
            )  # fmt: skip
        chosen.save(student)
        shown["student"] = str(student)
    _show(shown, as_json)


@app.command("eval")
def evaluate(
    model: Model,
    data: Annotated[Path, typer.Option(help="Texts with labels that need no protection.")],
    prompt: Annotated[
        Path | None, typer.Option(help="A .safetensors or .json prompt; else --template, --words as they are.")
    ] = None,
    template: Question = "{text}",
    words: Words = "",
    classes: Classes = None,
    instruction: Instruction = "",
    calibrate: Annotated[bool, typer.Option("--calibrate", help="Take out the answers to empty inputs.")] = False,
    as_json: AsJson = False,
) -> None:
    """The accuracy of a prompt, or of the model without one."""
    from terrine.prompts import DiscretePrompt, LocalModel, SoftPrompt, examples
    from terrine.prompts.student import calibrated

    used: SoftPrompt | DiscretePrompt
    if prompt is None:
        used = DiscretePrompt(_template(template, words, instruction))
    else:
        used = SoftPrompt.load(prompt) if prompt.suffix == ".safetensors" else DiscretePrompt.load(prompt)
    if not used.template.words:
        raise InvalidArgument("no label words: want --words, or a prompt that was made with some")
    texts, labels = examples.read(data, _classes(classes, used.template))
    language = _language(model)
    backend: Any = language
    if isinstance(used, DiscretePrompt):
        backend = LocalModel(language)
        used = calibrated(backend, used) if calibrate else used
    shown = _measured(used.log_probabilities, backend, texts, labels, as_json)
    _show(shown | ({} if used.privacy is None else _privacy(dict(used.privacy))), as_json)


def _measured(
    ask: Callable[..., Any], model: Any, texts: list[str], labels: list[int], quiet: bool, at_once: int = 64
) -> dict[str, Any]:
    """Accuracy, asked in pieces so that the bar moves."""
    right = 0
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    with counted("texts", quiet=quiet) as progress:
        for start in range(0, len(order), at_once):
            places = order[start : start + at_once]
            found = ask(model, [texts[place] for place in places]).argmax(axis=1)
            right += sum(int(one == labels[place]) for one, place in zip(found, places, strict=True))
            if progress is not None:
                progress(start + len(places), len(order))
    return {"accuracy": right / len(texts), "texts": len(texts)}


def _language(path: Path) -> LanguageModel:
    from terrine.prompts import LanguageModel

    return LanguageModel.load(path)


def _meant(epsilon: float, delta: float | None, texts: int, weak_guarantee: bool) -> float:
    """The delta asked for, or a power of ten below 1/texts.

    Raises:
        InvalidArgument: the guarantee would mean little, and that is not wanted.
    """
    failing = delta if delta is not None else 10.0 ** math.floor(math.log10(0.999 / texts))
    weakness = check.weakness(epsilon, failing, units=texts)
    if weakness and not weak_guarantee:
        raise InvalidArgument(
            f"{weakness}; want epsilon at most {check.LARGEST_EPSILON:g} and delta below 1/texts, or --weak-guarantee"
        )
    return failing


def _ready(*paths: Path | None) -> None:
    """Make the folders that results go to, before anything is paid for."""
    for path in paths:
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidArgument(f"{path}: no such folder can be made ({error.strerror}); want a file") from None
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise InvalidArgument(f"{path}: not a file that can be written; want one for the result")


def _template(text: str, words: str, instruction: str) -> Template:
    from terrine.prompts import Template

    return Template(_unescaped(text), tuple(words.split(",")) if words else (), _unescaped(instruction))


def _unescaped(text: str) -> str:
    """With new lines where the terminal's user wrote them."""
    return text.replace("\\n", "\n")


def _classes(told: str | None, template: Template) -> list[str]:
    names = [word.strip() for word in template.words] if told is None else told.split(",")
    if template.words and len(names) != len(template.words):
        raise InvalidArgument(f"--classes names {len(names)} for {len(template.words)} label words: want one for each")
    return names


def _privacy(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "event"}


def _write_labels(path: Path, texts: list[str], labels: list[int], names: list[str]) -> None:
    kept = [{"text": text, "label": names[label]} for text, label in zip(texts, labels, strict=True) if label >= 0]
    lines = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in kept)
    files.write(path, lines, private=False)


def _show(record: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(record))
        return
    width = max(len(name) for name in record)
    for name, value in record.items():
        shown = up(value) if name in ("epsilon", "noise") and value is not None else value
        if shown is not None and shown is not False:
            typer.echo(f"{name.replace('_', ' '):<{width}}  {shown}")
