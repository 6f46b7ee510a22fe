/* A pipeline in C++17: a lambda as source, items with destructors, an owner of the pipeline, a
   stage that may throw and whose exception reaches main, rows without designated initialisers.
   c++ -std=c++17 -O2 -I. examples/pipeline_cpp.cpp -o pipeline_cpp -lpthread
   Windows: g++ -std=c++17 -O2 -I. examples/pipeline_cpp.cpp -o pipeline_cpp.exe
        or: cl /O2 /EHsc /std:c++17 /I. examples\pipeline_cpp.cpp */

#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <cstdio>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

struct Line {
    std::string text;
};

struct Numbers {
    std::vector<double> values;
};

SPDL_FN(parse, Line, Numbers) {
    if (in->text.empty()) return SPDL_SKIP;
    auto made = std::make_unique<Numbers>();
    std::istringstream words(in->text);
    for (std::string word; words >> word;) made->values.push_back(std::stod(word)); /* may throw */
    *out = made.release();
    return SPDL_OK;
}

int main() {
    const std::vector<std::string> text = { "1 2 3", "", "4 five", "6.5", "7 8" };
    const auto next_line = [&](spdl_task *task, void *, Line **out) { /* outlives the pipeline */
        if (spdl_sequence(task) == text.size()) return SPDL_END;
        *out = new Line{ text[spdl_sequence(task)] };
        return SPDL_OK;
    };
    spdl_pipeline_desc desc = {};
    spdl_pipeline *p = nullptr;
    desc.workers = 2;
    const spdl_result made = spdl_pipeline_create(
        &p, &desc,
        SPDL_STAGES(spdl_source<Line>("next_line", next_line).with_free_item(spdl_delete<Line>),
                    SPDL_PIPE(parse).with_concurrency(2).with_max_failures(1)
                        .with_free_item(spdl_delete<Numbers>),
                    SPDL_SINK(3)));
    if (made != SPDL_OK) return 1;
    const std::unique_ptr<spdl_pipeline, spdl_deleter> owner(p);

    double sum = 0;
    while (const auto numbers = spdl_next<std::unique_ptr<Numbers>>(p))
        for (const double value : numbers->values) sum += value;
    std::printf("the sum of the lines that are numbers: %g\n", sum);
    try {
        spdl_rethrow(p); /* of a second line like "4 five": one is allowed */
    } catch (const std::invalid_argument &thrown) {
        std::puts(thrown.what());
        return 1;
    }
    return sum == 27.5 ? 0 : 1;
}
