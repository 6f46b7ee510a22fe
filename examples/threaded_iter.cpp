/* A threaded iterator, as parsers and trainers in C++ have it (dmlc-core's ThreadedIter): one
   thread makes objects ahead of the consumer, who gives them back to be filled again. Here it is a
   pipeline of one row: no mutex, no condition variable, no state of a thread.
   c++ -std=c++17 -O2 -I. examples/threaded_iter.cpp -o threaded_iter -lpthread */

#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <cstdio>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

template <class T> class ThreadedIter {
public:
    /* Fills the object, which may have been used before. False: there are no more. */
    using Fill = std::function<bool(T &)>;

    explicit ThreadedIter(Fill fill, std::function<void()> before_first = [] {}, int ahead = 8)
        : fill_(std::move(fill)), before_first_(std::move(before_first)) {
        spdl_error error;
        spdl_ring_desc kept = {};
        spdl_pipeline_desc desc = {};
        kept.capacity = 2 * static_cast<std::size_t>(ahead);
        desc.error = &error;
        desc.workers = 1;
        if (spdl_ring_create(&used_, &kept) != SPDL_OK) throw std::bad_alloc();
        if (spdl_pipeline_create(&pipeline_, &desc,
                                 SPDL_STAGES(spdl_source<T>("make", &ThreadedIter::make, this)
                                                 .with_free_item(spdl_delete<T>),
                                             SPDL_SINK(ahead))) != SPDL_OK) {
            spdl_ring_destroy(used_, nullptr, nullptr);
            throw std::runtime_error(error.text);
        }
    }
    ThreadedIter(const ThreadedIter &) = delete;
    ThreadedIter &operator=(const ThreadedIter &) = delete;
    ~ThreadedIter() {
        spdl_pipeline_destroy(pipeline_);
        while (T *item = take_used()) delete item;
        spdl_ring_destroy(used_, nullptr, nullptr);
    }

    /* Null at the end. Throws what `fill` threw. */
    T *Next() {
        void *item = nullptr;
        const spdl_result result = spdl_pipeline_next(pipeline_, &item, SPDL_FOREVER);
        if (result < 0) spdl_rethrow(pipeline_);
        return result == SPDL_OK ? static_cast<T *>(item) : nullptr;
    }
    /* Gives an object of Next back. */
    void Recycle(T *item) {
        if (spdl_ring_try_push(used_, &item) != SPDL_OK) delete item;
    }
    /* From the beginning again, also after an exception. */
    void BeforeFirst() {
        spdl_pipeline_stop(pipeline_, SPDL_FOREVER);
        before_first_(); /* nothing runs now */
        spdl_pipeline_rewind(pipeline_, 0, SPDL_FOREVER);
    }

private:
    T *take_used() {
        T *item = nullptr;
        return spdl_ring_try_pop(used_, &item) == SPDL_OK ? item : nullptr;
    }
    spdl_result make(spdl_task *, void *, T **out) {
        std::unique_ptr<T> item(take_used());
        if (!item) item = std::make_unique<T>();
        if (!fill_(*item)) return SPDL_END;
        *out = item.release();
        return SPDL_OK;
    }

    const Fill fill_;
    const std::function<void()> before_first_;
    spdl_ring *used_ = nullptr; /* objects that were given back */
    spdl_pipeline *pipeline_ = nullptr;
};

/* Lines of "label feature feature ..." become blocks of rows. */
struct Block {
    std::vector<std::string> lines;
};

int main() {
    enum { LINES = 20000, BLOCK = 64 };
    int line = 0, bad = -1;
    ThreadedIter<Block> blocks(
        [&](Block &block) {
            block.lines.clear(); /* its memory is used again */
            for (; line < LINES && block.lines.size() < BLOCK; ++line) {
                if (line == bad) throw std::runtime_error("line " + std::to_string(line));
                block.lines.push_back(std::to_string(line % 2) + " " + std::to_string(line));
            }
            return !block.lines.empty();
        },
        [&] { line = 0; });
    for (int epoch = 0; epoch < 2; ++epoch) {
        std::size_t lines = 0, characters = 0;
        while (Block *block = blocks.Next()) {
            lines += block->lines.size();
            for (const std::string &text : block->lines) characters += text.size();
            blocks.Recycle(block);
        }
        std::printf("epoch %d: %zu lines, %zu characters\n", epoch, lines, characters);
        if (epoch == 1) bad = 5000;
        blocks.BeforeFirst();
    }
    try {
        while (Block *block = blocks.Next()) blocks.Recycle(block);
    } catch (const std::runtime_error &error) {
        std::printf("then: %s\n", error.what());
        return 0;
    }
    return 1;
}
