"""In the manner of the ImageNet example: AverageMeter, validation, the best checkpoint, early stopping."""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AverageMeter:
    """Computes and stores the average and current value"""

    def __init__(self, name, fmt=":f"):
        self.name = name
        self.fmt = fmt
        self.reset()

    def reset(self):
        self.val = 0
        self.avg = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        fmtstr = "{name} {val" + self.fmt + "} ({avg" + self.fmt + "})"
        return fmtstr.format(**self.__dict__)


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix=""):
        num_digits = len(str(num_batches // 1))
        self.batch_fmtstr = "[{:" + str(num_digits) + "d}/" + str(num_batches) + "]"
        self.meters = meters
        self.prefix = prefix

    def display(self, batch):
        print("\t".join([self.prefix + self.batch_fmtstr.format(batch)] + [str(meter) for meter in self.meters]))


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad_epochs = patience, None, 0

    def __call__(self, value):
        if self.best is None or value > self.best:
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
        return self.bad_epochs >= self.patience


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        maxk = max(topk)
        batch_size = target.size(0)
        _, pred = output.topk(maxk, 1, True, True)
        pred = pred.t()
        correct = pred.eq(target.view(1, -1).expand_as(pred))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / batch_size) for k in topk]


def train(loader, model, criterion, optimizer, epoch, args):
    losses = AverageMeter("Loss", ":.17g")
    top1 = AverageMeter("Acc@1", ":.17g")
    top2 = AverageMeter("Acc@2", ":.17g")
    progress = ProgressMeter(len(loader), [losses, top1, top2], prefix=f"Epoch: [{epoch}]")
    model.train()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        acc1, acc2 = accuracy(output, target, topk=(1, 2))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0].item(), images.size(0))
        top2.update(acc2[0].item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        args.history.append(losses.val.hex())
        if i % args.print_freq == 0:
            progress.display(i + 1)


def validate(loader, model, criterion, args):
    losses = AverageMeter("Loss", ":.17g")
    top1 = AverageMeter("Acc@1", ":.17g")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model(images)
            losses.update(criterion(output, target).item(), images.size(0))
            top1.update(accuracy(output, target)[0].item(), images.size(0))
    losses.all_reduce()
    top1.all_reduce()
    print(f" * Acc@1 {top1.avg!r} Loss {losses.avg!r}")
    return top1.avg


def save_checkpoint(state, is_best, directory):
    filename = os.path.join(directory, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(directory, "model_best.pth.tar"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", required=True)
    parser.add_argument("--epochs", default=6, type=int)
    parser.add_argument("-b", "--batch-size", default=4, type=int)
    parser.add_argument("-p", "--print-freq", default=2, type=int)
    args = parser.parse_args()
    args.history = []
    dist.init_process_group("gloo", init_method="env://")
    rank = dist.get_rank()
    torch.manual_seed(5)
    os.makedirs(args.output_dir, exist_ok=True)

    images = torch.randn(120, 1, 8, 8)
    labels = (images.mean(dim=(1, 2, 3)) * 16).long().clamp(-2, 2) + 2
    data = TensorDataset(images, labels)
    train_set, val_set = Subset(data, range(84)), Subset(data, range(84, 120))
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=DistributedSampler(val_set, shuffle=False))

    model = nn.Sequential(
        *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 5)),
    )
    model = torch.nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    stopper = EarlyStopping(patience=2)

    best_acc1 = 0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if rank == 0:
            save_checkpoint(
                {
                    "epoch": epoch + 1,
                    "state_dict": model.state_dict(),
                    "best_acc1": best_acc1,
                    "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                },
                is_best,
                args.output_dir,
            )
        if stopper(acc1):
            print(f"early stopping after epoch {epoch}")
            break
    torch.save(model.state_dict(), os.path.join(args.output_dir, f"final-{rank}.pth"))
    with open(os.path.join(args.output_dir, f"losses-{rank}.txt"), "w") as f:
        f.write("\n".join(args.history) + "\n")


if __name__ == "__main__":
    main()
