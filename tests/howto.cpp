// Runs what examples/HOWTO.md answers in C++: check_howto.sh puts its blocks into howto_blocks.hpp.
// What the page takes from the program, a loop and its types, is here.
#include <chrono>
#include <condition_variable>
#include <coroutine>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <thread>

struct Request {
    int id, answer;
};

struct Detached {
    struct promise_type {
        Detached get_return_object() { return {}; }
        std::suspend_never initial_suspend() noexcept { return {}; }
        std::suspend_never final_suspend() noexcept { return {}; }
        void return_void() {}
        void unhandled_exception() { std::terminate(); }
    };
};

// One thread, which resumes what waits for an answer.
class Loop {
public:
    struct Answer {
        Loop *loop;
        int id;
        bool await_ready() const { return false; }
        void await_suspend(std::coroutine_handle<> handle) {
            const std::lock_guard<std::mutex> lock(loop->mutex_);
            loop->waiting_.push_back(handle);
            loop->some_.notify_one();
        }
        int await_resume() const {
            if (id % 10 == 3) throw std::runtime_error("no answer");
            return id * 2;
        }
    };
    Answer answer_to(int id) { return { this, id }; }
    ~Loop() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
            some_.notify_one();
        }
        thread_.join();
    }

private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            some_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            const std::coroutine_handle<> handle = waiting_.front();
            waiting_.pop_front();
            lock.unlock();
            handle.resume();
            lock.lock();
        }
    }
    std::mutex mutex_;
    std::condition_variable some_;
    std::deque<std::coroutine_handle<>> waiting_;
    bool ends_ = false;
    std::thread thread_{ [this] { run(); } };
};

#include "../spdl.h"

static spdl_result make(spdl_task *task, void *, Request **out) {
    if (spdl_sequence(task) == 1000) return SPDL_END;
    *out = new Request{ static_cast<int>(spdl_sequence(task)), 0 };
    return SPDL_OK;
}

// As much of Qt as the page uses, with its macros: an event loop, which calls what was posted.
#define slots
#define signals public
#define emit

namespace Qt {
enum ConnectionType { QueuedConnection };
}
struct QObject {};

static std::mutex posted_mutex;
static std::condition_variable posted_some;
static std::deque<std::function<void()>> posted;
static int viewer_shown;
static bool viewer_ended;

struct QMetaObject {
    template <class Call> static void invokeMethod(QObject *, Call call, Qt::ConnectionType) {
        const std::lock_guard<std::mutex> lock(posted_mutex);
        posted.emplace_back(call);
        posted_some.notify_one();
    }
};

static void show(const Request &request) { viewer_shown += request.id == viewer_shown; }
static void quit() { viewer_ended = true; }

#include "howto_blocks.hpp"

static bool event_loop() {
    const Viewer viewer;
    while (!viewer_ended) {
        std::unique_lock<std::mutex> lock(posted_mutex);
        if (!posted_some.wait_for(lock, std::chrono::seconds(20), [] { return !posted.empty(); }))
            return false;
        const std::function<void()> call = posted.front();
        posted.pop_front();
        lock.unlock();
        call();
    }
    return viewer_shown == 1000;
}

static bool coroutines() {
    Loop loop;
    spdl_pipeline *p;
    spdl_pipeline_desc desc = {};
    int count = 0, wrong = 0;
    desc.workers = 1;
    if (spdl_pipeline_create(
            &p, &desc,
            SPDL_STAGES(spdl_source<Request>("make", make).with_free_item(spdl_delete<Request>),
                        fetch_row(&loop), SPDL_SINK(3))) != SPDL_OK)
        return false;
    const std::unique_ptr<spdl_pipeline, spdl_deleter> owner(p);
    while (auto request = spdl_next<std::unique_ptr<Request>>(p)) {
        count++;
        wrong += request->answer != request->id * 2 || request->id % 10 == 3;
    }
    return count == 900 && wrong == 0 && !spdl_pipeline_failed(p);
}

int main() {
    const bool coroutine = coroutines(), event = event_loop();
    if (!coroutine) std::puts("coroutines");
    if (!event) std::puts("event loop");
    return coroutine && event ? 0 : 1;
}
