"""How a text becomes a question, and a class a word: the template and its label words.

instruction                      The first words of a discrete prompt, before any demonstration.
text          "{text}\nMood:"    The question; {mask} marks where an encoder is to fill in.
words         (" bad", " good")  One token each: what follows the question, by class.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from terrine.errors import InvalidArgument

if TYPE_CHECKING:
    from terrine.prompts.language import LanguageModel


@dataclass(frozen=True)
class Template:
    """A question around a text, and the words that stand for its classes; without words, the answer is free text.

    Raises:
        InvalidArgument: the question does not hold {text} once, or there is one word only, or one twice.
    """

    text: str = "{text}"
    words: tuple[str, ...] = ()
    instruction: str = ""
    separator: str = "\n\n"

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", tuple(self.words))
        if self.text.count("{text}") != 1:
            raise InvalidArgument(f"template {self.text!r}: want {{text}} in it, once")
        if len(self.words) == 1 or len(set(self.words)) < len(self.words):
            raise InvalidArgument(f"label words {list(self.words)}: want at least two, all different")

    @property
    def classes(self) -> int:
        """How many classes there are; 0 where answers are free."""
        return len(self.words)

    def question(self, text: str) -> str:
        """The text in its question."""
        return self.text.replace("{text}", text)

    def prompt(self, demonstrations: Iterable[tuple[str, int]] = ()) -> str:
        """The instruction and the answered questions, ready for one more question."""
        parts = [self.instruction] if self.instruction else []
        parts += [self.question(text) + self.words[label] for text, label in demonstrations]
        return "".join(part + self.separator for part in parts)


def word_ids(language: LanguageModel, words: Iterable[str]) -> list[int]:
    """The one token of each label word.

    Raises:
        InvalidArgument: a word is several tokens, or two words begin with the same one.
    """
    tokens = {word: language.tokens(word) for word in words}
    several = {word: found for word, found in tokens.items() if len(found) != 1}
    if several:
        shown = ", ".join(f"{word!r} ({len(found)} tokens)" for word, found in several.items())
        raise InvalidArgument(f"label words of several tokens: {shown}; want one token each, often with a space before")
    found = [one[0] for one in tokens.values()]
    if len(set(found)) < len(found):
        raise InvalidArgument(
            f"label words {list(tokens)}: two have the same token; want one token each, all different"
        )
    return found
