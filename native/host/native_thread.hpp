// Threads that never run a signal handler and carry a name in /proc and in debuggers.
#pragma once

#include <pthread.h>

#include <csignal>
#include <thread>
#include <utility>

namespace freetoken::host {

// Signals are the Python main thread's; a worker that took one would delay it.
template <class Function>
std::thread start_thread(const char* name, Function&& function) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  struct Restore {
    sigset_t* mask;
    ~Restore() { pthread_sigmask(SIG_SETMASK, mask, nullptr); }
  } restore{&before};
  std::thread thread(std::forward<Function>(function));
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace freetoken::host
