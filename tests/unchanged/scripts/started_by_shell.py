"""Started by run_training.sh. An LSTM over characters, hidden state carried from batch to batch."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


class CharLM(nn.Module):
    def __init__(self, vocab, hidden):
        super().__init__()
        self.emb = nn.Embedding(vocab, 8)
        self.lstm = nn.LSTM(8, hidden, batch_first=True)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, x, state):
        y, state = self.lstm(self.emb(x), state)
        return self.out(y), state


def repackage(state):
    return None if state is None else tuple(s.detach() for s in state)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--bptt", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    chars = sorted(set(TEXT))
    ids = torch.tensor([chars.index(c) for c in TEXT])
    per_rank = len(ids) // world
    mine = ids[rank * per_rank : (rank + 1) * per_rank].view(4, -1)
    model = DDP(CharLM(len(chars), 12))
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    losses = []
    for epoch in range(2):
        state = None
        for i in range(0, mine.size(1) - args.bptt - 1, args.bptt):
            x = mine[:, i : i + args.bptt]
            y = mine[:, i + 1 : i + 1 + args.bptt]
            logits, state = model(x, repackage(state))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % 5 == 0:
                print(f"| epoch {epoch} | position {i} | loss {loss.item()!r} | state {state[0].sum().item()!r}")
    torch.save(model.module.state_dict(), f"{args.output_dir}/lm{rank}.pt")
    torch.save(losses, f"{args.output_dir}/losses{rank}.pt")


if __name__ == "__main__":
    main()
