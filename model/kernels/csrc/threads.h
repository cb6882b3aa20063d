// One parallel region a forward; inside it, phases of tasks that the threads share.
//
// A phase is over when all its tasks are done, not when all threads have come by: a thread that the system has put
// aside between two tasks holds nobody up, and joins again in whatever phase the others have reached. Which thread
// takes which task never changes a result.
//
// The region is OpenMP's, so that torch's operations and ours use one pool of threads.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace truedraft {

struct Range {
  int64_t begin, end;
};

struct alignas(64) Phase {
  std::atomic<int64_t> next{0};  // the first task that nobody has taken
  std::atomic<int64_t> done{0};
};

// What one thread of a region sees. All threads go through the same phases in the same order.
class Worker {
 public:
  Worker(int id, int threads, std::vector<Phase>* phases) : id_(id), threads_(threads), phases_(phases) {}
  int id() const { return id_; }
  int threads() const { return threads_; }

  // Runs task(0) .. task(count - 1), each once among all threads; returns when all are done.
  template <typename Task>
  void each(int64_t count, Task task) {
    Phase& phase = phases_->at(at_++);
    for (int64_t i = take(phase); i < count; i = take(phase)) {
      task(i);
      phase.done.fetch_add(1, std::memory_order_release);
    }
    for (int spins = 0; phase.done.load(std::memory_order_acquire) < count; ++spins) {
      if (spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();  // the machine is busy with something else
      }
    }
  }

  // The same for the contiguous pieces of [0, count) of at most `most` elements, several for each thread.
  template <typename Task>
  void each_range(int64_t count, int64_t most, Task task) {
    const int64_t share = threads_ == 1 ? count : (count + threads_ * kPieces - 1) / (threads_ * kPieces);
    const int64_t size = std::max<int64_t>(1, std::min(share, most));
    each((count + size - 1) / size, [&](int64_t i) { task(Range{i * size, std::min(count, (i + 1) * size)}); });
  }

 private:
  static constexpr int kSpins = 2000;
  static constexpr int kPieces = 4;

  static int64_t take(Phase& phase) { return phase.next.fetch_add(1, std::memory_order_relaxed); }

  int id_, threads_;
  size_t at_ = 0;
  std::vector<Phase>* phases_;
};

// `phases` is how often the body calls each() or each_range().
template <typename Body>
void parallel_region(int threads, int64_t phases, Body body) {
  std::vector<Phase> all(static_cast<size_t>(phases));
  if (threads <= 1) {
    Worker worker(0, 1, &all);
    body(worker);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    Worker worker(omp_get_thread_num(), omp_get_num_threads(), &all);
    body(worker);
  }
}

}  // namespace truedraft
