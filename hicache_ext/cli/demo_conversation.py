"""What is said in ``hicache-ext demo``: a story told in turns, on an island that the system prompt describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

QUESTIONS = (
    "Tell me a story about a lighthouse keeper called Marta, who lives on a small island with a white horse.",
    "One night there was a storm. What did Marta see from the top of the tower?",
    "A sailor came to the island in a broken boat. Who was he, and what did he want?",
    "What did the white horse do then?",
    "In the morning the sea was calm. What did they find on the beach?",
    "How does the story end?",
)

_SYSTEM = """You are a friendly storyteller. Your stories play on this island:

The lighthouse of Skarholm stands on a small island in the north, four kilometres from the harbour of Vik. It was \
built in 1874 by the engineer Ida Lund, who had built two bridges before. The work took three summers, because in \
winter no boat could land. Forty men carried the stones up from the beach, and a white horse called Bruno pulled the \
heaviest of them. The tower is thirty-one metres high and has one hundred and forty-eight steps. Its walls are two \
metres thick at the bottom and half a metre thick at the top.

The lamp burned oil until 1926, then gas until 1951. Since then it is electric. The lens was made in Paris; it \
weighs two tons and turns on a bath of mercury, so lightly that a child can move it with one finger. On a clear \
night the light can be seen from forty kilometres. It shows two flashes, then it is dark for ten seconds. Sailors \
call it the Winking Eye.

The first keeper was Jonas Berg. He lived on the island for twenty-nine years with his wife Marta and their five \
children. Marta kept a diary. She wrote about storms, about seals on the beach, and about the ships that passed. In \
the winter of 1891 the sea froze, and the family walked to Vik over the ice to buy flour. The youngest daughter, \
Elsa, became keeper after her father, and she was the first woman in the country who held that post. She stayed \
until 1938.

In the night of 12 November 1903 the steamer Aurora lost her way in the snow and struck the rocks south of the \
island. Elsa and Jonas rowed out four times and saved twenty-three people. The ship's bell was found by divers in \
1978. It hangs beside the door of the house, and each visitor may ring it once. The captain of the Aurora sent the \
family a clock, which still goes and is wound each Sunday.

The last keeper left in 1984, when the light became automatic. The house stood empty for eight years. Then the \
people of Vik bought it for one crown and made a museum of it. They repaired the roof, painted the doors blue, and \
planted a garden with rhubarb, mint and potatoes, as Marta had described it. It has six rooms: the kitchen, the \
bedroom, the school room, the workshop, the oil cellar and the lamp room at the top.

In the kitchen there is a small cafe. It is run by Nils Aker, who bakes waffles after Marta's recipe and serves them \
with cloudberry jam. Coffee is free for those who carry a bucket of water from the well. In the school room children \
can write with ink and a feather. In the workshop a blacksmith shows on Saturdays how the hinges of the doors were \
made.

Puffins nest on the west side from April to August, about two hundred pairs. Grey seals rest on the north beach at \
low tide. There is one old apple tree on the island, which Elsa planted in 1910; its apples are red and sour. The \
highest point is called the Chair, because Marta used to sit there and look for the boat of her husband."""


@dataclass(slots=True)
class Story:
    """The conversation so far, as a model's own tokenizer and chat template write it; ``tokens`` is the next prompt.

    What was answered stays as the tokens that were generated: a tokenizer may make others of the same text, and nothing
    after them would be found in any cache.
    """

    tokenizer: Any
    tokens: list[int] = field(default_factory=list)
    _messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": _SYSTEM}])

    def ask(self, question: str) -> list[int]:
        """Add a question; returns a copy of the whole prompt."""
        self._messages.append({"role": "user", "content": question})
        whole = self._write()
        answer = self._messages[-2]["content"]
        if not self.tokens or not answer or answer not in whole:
            self.tokens, written = [], whole
        else:
            written = whole[whole.rindex(answer) + len(answer) :]
        self.tokens += self.tokenizer.encode(written, add_special_tokens=False)
        return list(self.tokens)

    def answered(self, text: str, output_ids: Sequence[int]) -> None:
        """What the model said to the last question."""
        ids = list(output_ids)
        if ids and ids[-1] == self.tokenizer.eos_token_id:
            ids.pop()  # the template writes it again
        self.tokens += ids
        self._messages.append({"role": "assistant", "content": text.strip()})

    def _write(self) -> str:
        if getattr(self.tokenizer, "chat_template", None):
            return str(self.tokenizer.apply_chat_template(self._messages, tokenize=False, add_generation_prompt=True))
        return "".join(f"{message['role']}: {message['content']}\n" for message in self._messages) + "assistant: "
