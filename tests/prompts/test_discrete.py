"""PromptPATE: disjoint prompts vote, noise hides one vote, the student is chosen from what was bought."""

import numpy as np
import pytest

from terrine import accounting, pate
from terrine.errors import InvalidArgument
from terrine.events import Budget
from terrine.prompts import DiscretePrompt, LocalModel, Template, choose, vote
from terrine.prompts.calibration import answers, prior
from terrine.prompts.student import _ahead, _fitted, calibrated
from terrine.prompts.teachers import balanced
from terrine.prompts.voting import confident, record
from terrine.rng import Seeded

from . import tiny

TEMPLATE = Template("{text} Mood :", (" good", " bad"), instruction="the review", separator=" ")
PRIVATE = [(text, label) for text, label in zip(tiny.TEXTS, tiny.LABELS, strict=True)] * 4


class Server:
    """A stand-in for a model behind an API: it counts good and bad words, and leans to what its prompt shows last."""

    def __init__(self, lean=0.0):
        self.lean, self.asked = lean, []

    def log_probabilities(self, prompt, questions, words):
        self.asked.append((prompt, list(questions)))
        rows = []
        for question in questions:
            told = question.split()
            good = sum(word in ("fun", "great", "good") for word in told)
            bad = sum(word in ("dull", "awful", "not", "bad", "long") for word in told)
            last = self.lean * (1 if prompt.strip().endswith("good") else -1 if prompt.strip().endswith("bad") else 0)
            rows.append([good - bad + last, 0.0])
        scores = np.array(rows)
        return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)


def test_a_prompt_shows_instruction_and_demonstrations():
    assert TEMPLATE.prompt([("dull", 1), ("fun", 0)]) == "the review dull Mood : bad fun Mood : good "
    assert Template("{text}:").prompt() == ""


def test_demonstrations_take_turns_among_classes():
    shown = balanced([("a", 1), ("b", 1), ("c", 0), ("d", 1), ("e", 0)], 4)
    assert shown == [("c", 0), ("a", 1), ("e", 0), ("b", 1)]
    assert balanced([("a", 1)], 4) == [("a", 1)]


def test_votes_are_those_of_a_loop_over_teachers():
    language = tiny.language()
    backend, deal = LocalModel(language), pate.split(len(PRIVATE), 5, seed=0)
    found = vote(backend, TEMPLATE, PRIVATE, deal, tiny.TEXTS, shots=3, calibration=None)
    expected = np.zeros((len(tiny.TEXTS), 2), dtype=int)
    for part in deal.parts:
        prompt = TEMPLATE.prompt(balanced([PRIVATE[place] for place in part], 3))
        for place, text in enumerate(tiny.TEXTS):
            row = LocalModel(language, reuse=False).log_probabilities(prompt, [TEMPLATE.question(text)], TEMPLATE.words)
            expected[place, row[0].argmax()] += 1
    assert found.counts.tolist() == expected.tolist()
    assert found.disjoint


def test_one_private_example_moves_the_votes_of_its_teacher_only():
    language = tiny.language()
    deal = pate.split(len(PRIVATE), 6, seed=0)
    queries = [*tiny.TEXTS, "the film was long", "a great and very fun movie"]
    moved = 0
    for place in range(0, len(PRIVATE), 5):
        other = list(PRIVATE)
        other[place] = ("very very awful story", 1 - other[place][1])
        one, two = (vote(LocalModel(language), TEMPLATE, data, deal, queries).counts for data in (PRIVATE, other))
        assert np.abs(one - two).sum(axis=1).max() <= 2  # one vote leaves one class and comes to another
        moved += np.abs(one - two).sum()
    assert moved > 0


def test_each_teacher_is_read_once_with_all_its_questions():
    server, deal = Server(), pate.split(len(PRIVATE), 4, seed=1)
    seen = []
    vote(server, TEMPLATE, PRIVATE, deal, tiny.TEXTS, progress=lambda done, total: seen.append((done, total)))
    assert len(server.asked) == 4
    assert len({prompt for prompt, _ in server.asked}) == 4
    assert all(len(questions) == len(tiny.TEXTS) + 3 for _, questions in server.asked)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
    server.asked.clear()
    vote(server, TEMPLATE, PRIVATE, deal, tiny.TEXTS, calibration=tiny.TEXTS)
    assert all(len(questions) == len(tiny.TEXTS) for _, questions in server.asked)  # asked once, used twice


def test_calibration_undoes_a_lean_to_one_class():
    leaning, prompt = Server(lean=3.0), TEMPLATE.prompt([("fun", 0)])
    raw = answers(leaning, TEMPLATE, prompt, tiny.TEXTS, None).argmax(axis=1)
    assert raw.tolist() == [0] * len(tiny.TEXTS)  # collapsed to one class
    even = answers(leaning, TEMPLATE, prompt, tiny.TEXTS, ["N/A"]).argmax(axis=1)
    assert even.tolist() == tiny.LABELS
    np.testing.assert_allclose(np.exp(prior(np.log([[0.2, 0.2], [0.1, 0.3]]))), [0.375, 0.625])
    # Oracle: the prior is the mean of probabilities normalised over the words, whatever they sum to.


def test_teachers_that_do_not_fit_are_refused():
    server, deal = Server(), pate.split(len(PRIVATE), 4, seed=1)
    with pytest.raises(InvalidArgument, match="want the deal of these"):
        vote(server, TEMPLATE, PRIVATE[:-1], deal, tiny.TEXTS)
    with pytest.raises(InvalidArgument, match="label 2: want 0"):
        vote(server, TEMPLATE, [("dull", 2), *PRIVATE[1:]], deal, tiny.TEXTS)
    with pytest.raises(InvalidArgument, match="at least one public text"):
        vote(server, TEMPLATE, PRIVATE, deal, [])
    shared = pate.Subsampled(rate=0.5, teachers=4).draw(len(PRIVATE), rng=Seeded(0))
    with pytest.raises(InvalidArgument, match="want a Partition"):
        vote(server, TEMPLATE, PRIVATE, shared, tiny.TEXTS)


def test_the_noise_for_a_budget_keeps_it_and_a_tenth_less_does_not():
    budget = Budget(epsilon=0.9, delta=1e-4)
    rule = confident(budget, teachers=200, queries=30, agreement=0.7)
    assert rule.threshold == 140
    assert accounting.epsilon(rule.event(30), delta=1e-4) <= 0.9
    less = pate.ConfidentGaussianMax(threshold=140, test_noise=0.9 * rule.noise, noise=0.9 * rule.noise)
    assert accounting.epsilon(less.event(30), delta=1e-4) > 0.9


def test_a_student_is_chosen_and_says_what_its_labels_cost(tmp_path):
    server = Server(lean=0.5)
    votes = vote(server, TEMPLATE, PRIVATE, pate.split(len(PRIVATE), 12, seed=0), tiny.TEXTS)
    rule = pate.ConfidentGaussianMax(threshold=6, test_noise=0.5, noise=0.5)
    bought = rule.answer(votes, rng=Seeded(1))
    privacy = record(bought, 1e-3)
    student = choose(server, TEMPLATE, tiny.TEXTS, bought.labels, shots=2, privacy=privacy)
    clear = [0, 1, 2, 4, 5]  # of the fourth text, the server knows nothing
    assert student.predict(server, tiny.TEXTS)[clear].tolist() == [tiny.LABELS[place] for place in clear]
    assert all(one in list(zip(tiny.TEXTS, bought.labels.tolist(), strict=True)) for one in student.demonstrations)
    assert student.privacy["epsilon"] == accounting.epsilon(rule.event(len(votes)), delta=1e-3)
    assert student.privacy["reproducible_noise_for_tests_only"] is True
    student.save(tmp_path / "student.json")
    assert DiscretePrompt.load(tmp_path / "student.json") == student


def test_the_student_does_not_score_a_prompt_on_what_it_shows():
    server = Server()
    choose(server, TEMPLATE, tiny.TEXTS, tiny.LABELS, shots=2, candidates=5)
    assert len(server.asked) > 3
    for prompt, questions in server.asked:
        shown = [text for text in tiny.TEXTS if f" {text} Mood" in prompt.replace("and dull", "and-dull")]
        shown += ["long and dull"] if "long and dull" in prompt else []
        assert not any(TEMPLATE.question(text) in questions for text in shown)
        assert len(shown) + len(questions) == len(tiny.TEXTS) + 3


def test_a_prompt_that_hurts_loses_to_none():
    """Where demonstrations make the model lean and no calibration helps, the empty prompt is chosen."""

    class Confused(Server):
        def log_probabilities(self, prompt, questions, words):
            found = super().log_probabilities(prompt, questions, words)
            return found if "Mood" not in prompt else np.log(np.full_like(found, 0.5))

    chosen = choose(Confused(), TEMPLATE, tiny.TEXTS * 2, tiny.LABELS * 2, shots=2)
    assert chosen.demonstrations == ()


def test_a_prompt_that_helps_every_text_is_taken():
    class Helped(Server):
        def log_probabilities(self, prompt, questions, words):
            found = super().log_probabilities(prompt, questions, words)
            return found if "Mood" in prompt else np.log(np.full_like(found, 0.5))

    texts = ["fun", "great", "good fun", "a fun film", "dull", "awful", "not good and dull", "a long film"]
    chosen = choose(Helped(), TEMPLATE, texts, [0, 0, 0, 0, 1, 1, 1, 1], shots=2)
    assert len(chosen.demonstrations) == 2


def test_one_lucky_prompt_among_poor_ones_is_not_taken():
    """Showing "great" makes the model sure and right; other demonstrations make it guess. On average they hurt."""

    class Lucky(Server):
        def log_probabilities(self, prompt, questions, words):
            found = super().log_probabilities(prompt, questions, words)
            sure = 5 * found - np.logaddexp.reduce(5 * found, axis=1, keepdims=True)
            return sure if " great Mood" in prompt else np.log(np.full_like(found, 0.5)) if "Mood" in prompt else found

    texts = ["fun", "great", "good fun", "a fun film", "dull", "awful", "not good and dull", "a long film"]
    labels = [0, 0, 0, 0, 1, 1, 1, 1]
    server = Lucky()
    assert choose(server, TEMPLATE, texts, labels, shots=2, candidates=12).demonstrations == ()
    assert any(" great Mood" in prompt for prompt, _ in server.asked)  # it was among the candidates


def test_the_lead_is_a_mean_over_prompts_then_texts_less_a_standard_error():
    empty = {"a": 0.2, "b": 0.4, "c": 0.6}
    family = [{"a": 0.5, "b": 0.5}, {"b": 0.7, "c": 0.9}]
    leads = [0.3, 0.2, 0.3]  # of b, the mean of 0.1 and 0.3
    mean = sum(leads) / 3
    deviation = (sum((one - mean) ** 2 for one in leads) / 2) ** 0.5
    assert _ahead(family, empty) == pytest.approx(mean - deviation / 3**0.5)
    assert _ahead([{"a": 0.9}], empty) == 0.0  # one text has no standard error


def test_the_calibration_meets_labels_and_even_answers_in_between():
    """Oracle for two classes: bisection on the one number that matters, the difference of the two biases."""
    answered = np.log(np.random.default_rng(0).dirichlet([1.0, 3.0], size=20))
    labels = np.array([0, 0, 0, 1])

    def excess(bias):
        first = 1 / (1 + np.exp(answered[:, 1] - answered[:, 0] + bias))
        return first[:4].sum() + 3 * 4 * first.mean() - (3 + 3 * 4 / 2)  # labels once, even shares three times

    low, high = -20.0, 20.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    found = _fitted(answered[:4], labels, answered)
    assert found[0] - found[1] == pytest.approx(low, abs=1e-6)


def test_unlabelled_public_texts_steady_the_calibration():
    """Where the model leans, what is taken out makes its answers to all public texts even."""

    class Leaning(Server):
        def log_probabilities(self, prompt, questions, words):
            scores = super().log_probabilities(prompt, questions, words) + np.array([4.0, 0.0])
            return scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)

    texts, labels, more = ["fun", "dull", "great fun", "awful"], [0, 1, 0, 1], ["good", "a long film", "a dull film"]
    server = Leaning()
    chosen = choose(server, TEMPLATE, texts, labels, shots=1, candidates=1, calibration=(), unlabelled=more)
    found = server.log_probabilities(chosen.text, [TEMPLATE.question(text) for text in [*texts, *more]], TEMPLATE.words)
    assert chosen.demonstrations == ()
    np.testing.assert_allclose(chosen.prior, _fitted(found[:4], np.array(labels), found))
    left = np.exp(found - chosen.prior)
    np.testing.assert_allclose((left / left.sum(axis=1, keepdims=True)).mean(axis=0), [0.5, 0.5], atol=0.1)
    assert chosen.predict(server, texts).tolist() == labels
    assert Leaning().log_probabilities("", texts, ("a", "b")).argmax(axis=1).tolist() == [0, 0, 0, 0]


def test_abstentions_are_left_out_and_too_few_labels_refused():
    labels = [0, -1, -1, -1, 1, -1]
    server = Server()
    choose(server, TEMPLATE, tiny.TEXTS, labels, shots=1)
    asked = {question for _, questions in server.asked for question in questions}
    assert TEMPLATE.question(tiny.TEXTS[1]) not in asked
    with pytest.raises(InvalidArgument, match="1 labelled texts"):
        choose(server, TEMPLATE, tiny.TEXTS, [0, -1, -1, -1, -1, -1])
    with pytest.raises(InvalidArgument, match="one for each"):
        choose(server, TEMPLATE, tiny.TEXTS, [0, 1])


def test_calibrated_prompts_and_files_that_are_none(tmp_path):
    server = Server(lean=2.0)
    shown = DiscretePrompt(TEMPLATE, (("fun", 0),))
    assert shown.predict(server, ["dull"]).tolist() == [0]
    assert calibrated(server, shown, ["N/A"]).predict(server, ["dull"]).tolist() == [1]
    np.testing.assert_allclose(np.exp(shown.log_probabilities(server, ["dull"])).sum(), 1)
    for name, content in (("a.json", "{}"), ("b.json", "no"), ("c.json", '{"format": "other"}')):
        (tmp_path / name).write_text(content)
        with pytest.raises(InvalidArgument, match="not a discrete prompt"):
            DiscretePrompt.load(tmp_path / name)
