/* A pipeline in C++17: rows without designated initialisers, items with destructors.
   c++ -std=c++17 -O2 -I. examples/pipeline_cpp.cpp -o pipeline_cpp -lpthread */

#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

struct Line {
    std::string text;
};

struct Words {
    std::vector<std::string> words;
};

template <class T> static void destroy(void *item) { delete static_cast<T *>(item); }

SPDL_FN(read_line, void, Line) {
    const auto &text = *static_cast<const std::vector<std::string> *>(spdl_ctx(task));
    if (spdl_sequence(task) == text.size()) return SPDL_END;
    *out = new Line{ text[spdl_sequence(task)] };
    return SPDL_OK;
}

SPDL_FN(split, Line, Words) {
    if (in->text.empty()) return SPDL_SKIP;
    auto made = std::make_unique<Words>();
    std::string word;
    for (const char c : in->text + " ") {
        if (c != ' ') {
            word += c;
        } else if (!word.empty()) {
            made->words.push_back(word);
            word.clear();
        }
    }
    *out = made.release();
    return SPDL_OK;
}

int main() {
    std::vector<std::string> text = { "the next batch", "", "is ready", "before you ask" };
    spdl_pipeline_desc desc = {};
    spdl_pipeline *p = nullptr;
    desc.workers = 2;
    const spdl_result made = spdl_pipeline_create(
        &p, &desc,
        SPDL_STAGES(SPDL_SOURCE(read_line).with_ctx(&text).with_free_item(destroy<Line>),
                    SPDL_PIPE(split).with_concurrency(2).with_free_item(destroy<Words>),
                    SPDL_SINK(3)));
    if (made != SPDL_OK) return 1;

    void *item = nullptr;
    std::size_t count = 0;
    while (spdl_pipeline_next(p, &item, SPDL_FOREVER) == SPDL_OK) {
        const std::unique_ptr<Words> words(static_cast<Words *>(item));
        for (const auto &word : words->words) std::printf("%s ", word.c_str());
        std::printf("(%zu)\n", words->words.size());
        count += words->words.size();
    }
    const bool failed = spdl_pipeline_failed(p);
    spdl_pipeline_destroy(p);
    return count == 8 && !failed ? 0 : 1;
}
