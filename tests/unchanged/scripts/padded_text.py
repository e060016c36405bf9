"""Sentences of different lengths: a collate function that pads and hands on lists of strings and a mask."""

import argparse
import collections
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

WORDS = "the a small big red blue cat dog bird sees likes eats runs sleeps quietly".split()  # noqa: SIM905


def build_corpus(n):
    g = torch.Generator().manual_seed(12)
    corpus = []
    for i in range(n):
        length = int(torch.randint(2, 11, (1,), generator=g))
        words = [WORDS[j] for j in torch.randint(0, len(WORDS), (length,), generator=g)]
        corpus.append({"id": f"s{i}", "text": " ".join(words), "label": int("cat" in words) + int("dog" in words)})
    return corpus


class Vocab:
    def __init__(self, corpus):
        counts = collections.Counter(w for s in corpus for w in s["text"].split())
        self.itos = ["<pad>", *sorted(counts, key=lambda w: (-counts[w], w))]
        self.stoi = {w: i for i, w in enumerate(self.itos)}

    def encode(self, text):
        return torch.tensor([self.stoi[w] for w in text.split()])


class Collator:
    def __init__(self, vocab):
        self.vocab = vocab

    def __call__(self, batch):
        ids = [self.vocab.encode(b["text"]) for b in batch]
        tokens = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(i) for i in ids], batch_first=True).bool()
        labels = torch.tensor([b["label"] for b in batch])
        return {"tokens": tokens, "mask": mask, "labels": labels, "texts": [b["text"] for b in batch], "n": len(batch)}


class Bag(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.embedding = nn.Embedding(n, 10, padding_idx=0)
        self.score = nn.Linear(10, 1)
        self.head = nn.Linear(10, 3)

    def forward(self, tokens, mask):
        e = self.embedding(tokens)
        weights = self.score(e).squeeze(-1).masked_fill(~mask, float("-inf")).softmax(-1)
        return self.head((weights.unsqueeze(-1) * e).sum(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", default="out")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(9)
    corpus = build_corpus(84)
    vocab = Vocab(corpus)
    sampler = DistributedSampler(corpus)
    loader = DataLoader(corpus, batch_size=4, sampler=sampler, collate_fn=Collator(vocab))
    model = DistributedDataParallel(Bag(len(vocab.itos)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    records = []
    tokens_seen = 0
    word_counts = collections.Counter()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for batch in loader:
            logits = model(batch["tokens"], batch["mask"])
            loss = F.cross_entropy(logits, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tokens_seen += int(batch["mask"].sum())
            word_counts.update(w for text in batch["texts"] for w in text.split())
            records.append((loss.item(), batch["tokens"].shape[1], batch["n"]))
        longest = max(batch["texts"], key=len)
        print(f"[{rank}] epoch {epoch} loss {loss.item()!r} tokens {tokens_seen} longest of last batch: {longest!r}")
    os.makedirs(args.output_dir, exist_ok=True)
    torch.save(model.module.state_dict(), os.path.join(args.output_dir, f"bag{rank}.pt"))
    with open(os.path.join(args.output_dir, f"records{rank}.json"), "w") as f:
        json.dump({"records": records, "tokens": tokens_seen, "words": word_counts}, f, indent=1)


if __name__ == "__main__":
    main()
