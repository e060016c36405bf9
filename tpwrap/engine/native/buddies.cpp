#include "buddies.hpp"

#include <sys/socket.h>
#include <unistd.h>

namespace torchpass {
namespace {

bool write_all(int fd, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t n = ::send(fd, data, size, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    data += n;
    size -= static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

Buddies::~Buddies() { clear(); }

void Buddies::add(int fd) {
  auto buddy = std::make_shared<Buddy>();
  buddy->fd = fd;
  {
    std::lock_guard<std::mutex> lock(m_);
    buddy->acked = wanted_;  // it owes us nothing that was published before
    buddies_.push_back(buddy);
  }
  buddy->reader = std::thread([this, buddy] { read_acks(buddy); });
}

void Buddies::clear() {
  std::vector<std::shared_ptr<Buddy>> old;
  {
    std::lock_guard<std::mutex> lock(m_);
    old.swap(buddies_);
  }
  for (auto& b : old) ::shutdown(b->fd, SHUT_RDWR);
  for (auto& b : old) {
    if (b->reader.joinable()) b->reader.join();
    ::close(b->fd);
  }
  settle();
}

int Buddies::publish(uint64_t seq, const std::string& frame) {
  std::vector<std::shared_ptr<Buddy>> targets;
  {
    std::lock_guard<std::mutex> lock(m_);
    wanted_ = seq;
    for (auto& b : buddies_) if (b->live) targets.push_back(b);
  }
  if (targets.empty()) return 0;
  settle();
  for (auto& b : targets)
    if (!write_all(b->fd, frame.data(), frame.size())) ::shutdown(b->fd, SHUT_RDWR);  // its reader sees the end
  return static_cast<int>(targets.size());
}

bool Buddies::wait(double seconds) {
  std::unique_lock<std::mutex> lock(m_);
  return cv_.wait_for(lock, std::chrono::duration<double>(seconds), [&] {
    for (auto& b : buddies_) if (b->live && b->acked < wanted_) return false;
    return true;
  });
}

void Buddies::read_acks(std::shared_ptr<Buddy> buddy) {
  while (true) {
    uint64_t seq = 0;
    const ssize_t n = ::recv(buddy->fd, &seq, sizeof seq, MSG_WAITALL);
    if (n < 0 && errno == EINTR) continue;
    {
      std::lock_guard<std::mutex> lock(m_);
      if (n == static_cast<ssize_t>(sizeof seq)) buddy->acked = seq;
      else buddy->live = false;  // a dead buddy must not hold the job; the next generation names a new one
    }
    settle();
    if (n != static_cast<ssize_t>(sizeof seq)) return;
  }
}

void Buddies::settle() {
  std::lock_guard<std::mutex> order(settling_);  // two settles must not apply their verdicts in the wrong order
  bool outstanding = false;
  {
    std::lock_guard<std::mutex> lock(m_);
    for (auto& b : buddies_) outstanding |= b->live && b->acked < wanted_;
    cv_.notify_all();
  }
  journal_->hold(outstanding);
}

}  // namespace torchpass
