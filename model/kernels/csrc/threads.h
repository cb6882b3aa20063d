// One parallel region a forward: phases inside it are separated by a barrier, work is shared by counters.
//
// The region is OpenMP's, so that torch's operations and ours use one pool of threads. The barrier is our own:
// it spins briefly, then yields, so that a busy machine loses little.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace truedraft {

class Barrier {
 public:
  void wait(int threads) {
    if (threads == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
      if (spins < kSpins) {
        _mm_pause();
      } else {
        sched_yield();
      }
    }
  }

 private:
  static constexpr int kSpins = 4000;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

struct Range {
  int64_t begin, end;
};

// What one thread of a region sees.
class Worker {
 public:
  Worker(int id, int threads, Barrier* barrier) : id_(id), threads_(threads), barrier_(barrier) {}
  int id() const { return id_; }
  int threads() const { return threads_; }
  void sync() { barrier_->wait(threads_); }

  // This thread's contiguous share of [0, count).
  Range share(int64_t count) const { return {count * id_ / threads_, count * (id_ + 1) / threads_}; }

 private:
  int id_, threads_;
  Barrier* barrier_;
};

// Tasks of unequal size, taken one by one. Which thread takes which never changes a result.
class TaskCounter {
 public:
  int64_t next() { return next_.fetch_add(1, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

template <typename Body>
void parallel_region(int threads, Body body) {
  Barrier barrier;
  if (threads <= 1) {
    Worker worker(0, 1, &barrier);
    body(worker);
    return;
  }
#pragma omp parallel num_threads(threads)
  {
    Worker worker(omp_get_thread_num(), omp_get_num_threads(), &barrier);
    body(worker);
  }
}

}  // namespace truedraft
