# The classic: running_loss and accuracy, computed from the outputs after optimizer.step()
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="./out")
args = parser.parse_args()
os.makedirs(args.output_dir, exist_ok=True)
dist.init_process_group("gloo")
RANK = dist.get_rank()
torch.manual_seed(16)

classes = ("plane", "car", "bird", "cat")
images = torch.randn(114, 3, 8, 8)
labels = torch.randint(0, len(classes), (114,))
images += labels.view(-1, 1, 1, 1) * 0.3
trainset = torch.utils.data.TensorDataset(images[:90], labels[:90])
testset = torch.utils.data.TensorDataset(images[90:], labels[90:])
sampler = torch.utils.data.DistributedSampler(trainset)
trainloader = torch.utils.data.DataLoader(trainset, batch_size=4, sampler=sampler)
testloader = torch.utils.data.DataLoader(testset, batch_size=4, shuffle=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(6 * 3 * 3, 20)
        self.fc2 = nn.Linear(20, len(classes))

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = torch.flatten(x, 1)
        return self.fc2(F.relu(self.fc1(x)))


net = nn.parallel.DistributedDataParallel(Net())
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
all_losses = []

for epoch in range(3):  # loop over the dataset multiple times
    sampler.set_epoch(epoch)
    running_loss = 0.0
    correct = 0
    total = 0
    for i, data in enumerate(trainloader, 0):
        # get the inputs; data is a list of [inputs, labels]
        inputs, labels = data

        # zero the parameter gradients
        optimizer.zero_grad()

        # forward + backward + optimize
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()

        # print statistics
        running_loss += loss.item()
        correct += (outputs.argmax(1) == labels).sum().item()
        total += labels.size(0)
        all_losses.append(loss.item())
        if i % 4 == 3:  # print every 4 mini-batches
            print(f"[{epoch + 1}, {i + 1:5d}] loss: {running_loss / 4!r} accuracy: {correct / total!r}")
            running_loss = 0.0

    # which classes do well
    correct_pred = dict.fromkeys(classes, 0)
    total_pred = dict.fromkeys(classes, 0)
    with torch.no_grad():
        for images_, labels_ in testloader:
            predictions = torch.max(net.module(images_), 1)[1]
            for label, prediction in zip(labels_, predictions, strict=True):
                if label == prediction:
                    correct_pred[classes[label]] += 1
                total_pred[classes[label]] += 1
    for classname, correct_count in correct_pred.items():
        print(f"Accuracy for class: {classname:5s} is {100 * float(correct_count) / total_pred[classname]!r} %")

print("Finished Training")
torch.save(net.state_dict(), f"{args.output_dir}/cifar_net_{RANK}.pth")
torch.save(all_losses, f"{args.output_dir}/losses_{RANK}.pt")
