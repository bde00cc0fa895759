"""A model so small that a swarm of eight trains it for an hour of virtual time in a minute, on the usual text."""

from __future__ import annotations

import statistics
from functools import lru_cache
from typing import final

import torch
from torch import Tensor, nn

from compression.chain import parse_chain
from compression.remembering import Remembering
from network.seam import PeerID
from optimizers.presets import Method
from peer.data import Corpus, load_corpus, sampler
from peer.learner import TorchLearner
from peer.method import Rules, initial_state, rules_of
from peer.trainer import Trainer

CONTEXT = 16
CLASSES = 32


class LetterModel(nn.Module):
    """Four letters in, the next one out, case and signs folded to 32 classes; 1,592 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, 6)
        self.hidden = nn.Linear(4 * 6, 24)
        self.out = nn.Linear(24, CLASSES)

    def forward(self, x_BT: Tensor) -> Tensor:
        """Logits `(B, T - 3, 32)`."""
        e_BTE = self.embed(x_BT)
        length = x_BT.shape[1] - 3
        seen = torch.cat([e_BTE[:, at : at + length] for at in range(4)], dim=-1)
        logits: Tensor = self.out(torch.relu(self.hidden(seen)))
        return logits


def next_letter_loss(model: nn.Module, batch: Tensor) -> Tensor:
    letters = batch % CLASSES
    return nn.functional.cross_entropy(model(letters[:, :-1]).reshape(-1, CLASSES), letters[:, 4:].reshape(-1))


@final
class Material:
    """What all peers of all runs have in common."""

    def __init__(self) -> None:
        self.corpus: Corpus = load_corpus(())
        self.held_out = self.corpus.validation_batches(batch=256, length=CONTEXT, batches=8)

    def loss(self, anchor: dict[str, Tensor]) -> float:
        model = LetterModel()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(anchor[name])
            return statistics.fmean(float(next_letter_loss(model, batch)) for batch in self.held_out)

    def learner(self, me: PeerID, method: Method, seed: int) -> TorchLearner:
        torch.manual_seed(seed)
        model, rules = LetterModel(), rules_for(method)
        sample = sampler(self.corpus, seed, me, batch=method.batch, length=CONTEXT)
        trainer = Trainer(model, next_letter_loss, sample, method)
        return TorchLearner(me, initial_state(model, rules), rules, trainer, self.held_out[:1])


@lru_cache(maxsize=8)
def rules_for(method: Method) -> Rules:
    # All peers read the same payloads.
    return rules_of(method, lambda text: Remembering(parse_chain(text)))
