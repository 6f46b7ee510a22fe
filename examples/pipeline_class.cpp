/* A class that owns a pipeline, whose stages are functions of the class. The object is the state of
   the stages: it must not move while the pipeline runs, so the class has no copy and no move.
   c++ -std=c++17 -O2 -I. examples/pipeline_class.cpp -o pipeline_class -lpthread */

#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

struct Signal {
    std::vector<float> samples;
};

class Loader {
public:
    Loader(std::vector<double> pitches, float gain) : pitches_(std::move(pitches)), gain_(gain) {
        spdl_error error;
        spdl_pipeline_desc desc = {};
        spdl_pipeline *made;
        desc.error = &error;
        if (spdl_pipeline_create(
                &made, &desc,
                SPDL_STAGES(spdl_source<Signal>("make", &Loader::make, this)
                                .with_free_item(spdl_delete<Signal>),
                            spdl_pipe<Signal, Signal>("scale", &Loader::scale, this)
                                .with_concurrency(2),
                            /* up to four captures: the row keeps a copy of the lambda */
                            spdl_pipe<Signal, Signal>("count", [this](spdl_task *, Signal *in,
                                                                      Signal **out) {
                                samples_ += in->samples.size();
                                *out = in;
                                return SPDL_OK;
                            }),
                            SPDL_SINK(3))) != SPDL_OK)
            throw std::runtime_error(error.text);
        pipeline_.reset(made);
    }
    Loader(const Loader &) = delete;
    Loader &operator=(const Loader &) = delete;

    /* Empty at the end. Throws what a stage threw. */
    std::unique_ptr<Signal> next() {
        auto signal = spdl_next<std::unique_ptr<Signal>>(pipeline_.get());
        if (!signal) spdl_rethrow(pipeline_.get());
        return signal;
    }
    std::size_t samples() const { return samples_; }

private:
    spdl_result make(spdl_task *task, void *, Signal **out) {
        if (spdl_sequence(task) == pitches_.size()) return SPDL_END;
        const double pitch = pitches_[spdl_sequence(task)];
        if (pitch < 0) throw std::domain_error("pitch " + std::to_string(pitch) + " is negative");
        auto signal = std::make_unique<Signal>();
        for (int i = 0; i < 1000; i++) signal->samples.push_back(float(std::sin(i * pitch)));
        *out = signal.release();
        return SPDL_OK;
    }

    spdl_result scale(spdl_task *, Signal *in, Signal **out) const {
        for (float &sample : in->samples) sample *= gain_;
        *out = in;
        return SPDL_OK;
    }

    const std::vector<double> pitches_;
    const float gain_;
    std::atomic<std::size_t> samples_{ 0 };
    /* last, so that it ends first: its stages use the other members */
    std::unique_ptr<spdl_pipeline, spdl_deleter> pipeline_;
};

int main() {
    Loader loader({ 0.1, 0.2, 0.3, -1, 0.5 }, 2);
    int signals = 0;
    try {
        while (loader.next()) signals++;
    } catch (const std::domain_error &error) {
        std::printf("%d signals, %zu samples, then: %s\n", signals, loader.samples(), error.what());
        return signals == 3 ? 0 : 1;
    }
    return 1;
}
