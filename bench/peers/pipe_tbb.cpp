// needs: libtbb-dev
// flags: -ltbb
#include <tbb/flow_graph.h>
#include <tbb/global_control.h>
#include <tbb/parallel_pipeline.h>
#include <tbb/task_arena.h>

#include "pipe_peer.hpp"

namespace {

/* Tokens bound what is in flight. To a trainer the last filter hands on through the outlet's
   window, which is then the last edge, so the tokens are what the other edges hold. */
struct Share {
    int tokens;
    tbb::global_control threads;

    explicit Share(pipe_outlet *o)
        : tokens(o->spec->live - (o->spec->pulled ? o->spec->buffer_size : 0)),
          threads(tbb::global_control::max_allowed_parallelism, size_t(pipe_threads(o->spec))) {
        if (o->spec->pulled) o->window = uint64_t(o->spec->buffer_size);
    }
};

/* What follows the last stage, one call at a time. */
void hand_on(pipe_outlet *o, void *item, uint64_t number) {
    if (o->spec->pulled) {
        pipe_put_wait(o, number, item);
    } else {
        o->spec->sink(o->spec->ctx, item);
    }
}

tbb::filter<void *, void *> stages(const pipe_spec *spec, int count) {
    auto stage = tbb::make_filter<void *, void *>(
        tbb::filter_mode::parallel, [=](void *item) { return spec->work(spec->ctx, item); });
    return count == 1 ? stage : stage & stages(spec, count - 1);
}

void run_pipeline(pipe_outlet *o) {
    const pipe_spec *spec = o->spec;
    const Share share(o);
    const auto last =
        spec->unordered ? tbb::filter_mode::serial_out_of_order : tbb::filter_mode::serial_in_order;
    uint64_t fed = 0;
    uint64_t out = 0;
    auto source = tbb::make_filter<void, void *>(
        tbb::filter_mode::serial_in_order, [&](tbb::flow_control &control) -> void * {
            void *item = nullptr;
            if (pipe_stopped(o) || !spec->feed(spec->ctx, fed, &item)) {
                control.stop();
                return nullptr;
            }
            ++fed;
            return item;
        });
    auto sink = tbb::make_filter<void *, void>(last, [&](void *item) { hand_on(o, item, out++); });
    tbb::task_arena arena(pipe_threads(spec));
    arena.execute([&] {
        tbb::parallel_pipeline(size_t(share.tokens), source & stages(spec, spec->pipes) & sink);
    });
}

using Stage = tbb::flow::function_node<Numbered, Numbered>;

void run_graph(pipe_outlet *o) {
    const pipe_spec *spec = o->spec;
    const Share share(o);
    tbb::task_arena arena(pipe_threads(spec));
    arena.execute([&] {
        uint64_t fed = 0;
        uint64_t out = 0;
        tbb::flow::graph graph;
        tbb::flow::input_node<Numbered> source(graph, [&](tbb::flow_control &control) -> Numbered {
            void *item = nullptr;
            if (!pipe_stopped(o) && spec->feed(spec->ctx, fed, &item)) {
                return Numbered{ item, fed++ };
            }
            control.stop();
            return Numbered{ nullptr, 0 };
        });
        tbb::flow::limiter_node<Numbered> limiter(graph, size_t(share.tokens));
        tbb::flow::sequencer_node<Numbered> order(graph,
                                                  [](const Numbered &n) { return n.number; });
        tbb::flow::function_node<Numbered, tbb::flow::continue_msg> sink(
            graph, tbb::flow::serial, [&](const Numbered &got) {
                hand_on(o, got.item, out++);
                return tbb::flow::continue_msg();
            });
        std::deque<Stage> nodes;
        for (int i = 0; i < spec->pipes; ++i) {
            nodes.emplace_back(graph, size_t(spec->concurrency), [=](const Numbered &got) {
                return Numbered{ spec->work(spec->ctx, got.item), got.number };
            });
            if (i > 0) tbb::flow::make_edge(nodes[size_t(i) - 1], nodes.back());
        }
        tbb::flow::make_edge(source, limiter);
        tbb::flow::make_edge(limiter, nodes.front());
        if (spec->unordered) {
            tbb::flow::make_edge(nodes.back(), sink);
        } else {
            tbb::flow::make_edge(nodes.back(), order);
            tbb::flow::make_edge(order, sink);
        }
        tbb::flow::make_edge(sink, limiter.decrementer());
        source.activate();
        graph.wait_for_all();
    });
}

const pipe_peer table[] = {
    { "oneTBB pipeline", run_pipeline, nullptr, nullptr, nullptr, nullptr },
    { "oneTBB flow graph", run_graph, nullptr, nullptr, nullptr, nullptr },
};

} // namespace

PIPE_PLUGIN(table);
