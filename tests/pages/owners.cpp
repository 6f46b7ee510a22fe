// unique_ptr through three stages that throw; failures are kept with their text.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>
#include "spdl.h"
struct Raw {
    int id;
    std::string text;
};
struct Num {
    int id;
    std::vector<double> v;
};
struct Out {
    int id;
    double norm;
};
static std::string text(int id) {
    return id % 11 == 3   ? "1.5 oops 2"
           : id % 17 == 5 ? ""
                          : std::to_string(id) + " 2.5 " + std::to_string(id % 9 - 4);
}
static Num parse(const Raw &r) {
    Num n{ r.id, {} };
    for (size_t at = 0, used; at < r.text.size(); at += used + 1)
        n.v.push_back(std::stod(r.text.substr(at), &used));
    return n;
}
static double norm(const Num &n) {
    double s = 0;
    if (n.v.empty()) throw std::length_error("no numbers in " + std::to_string(n.id));
    for (double x : n.v) s += x * x;
    if (n.v.back() == 0) throw 42; // not an exception class
    return std::sqrt(s);
}
int main(int argc, char **argv) {
    constexpr int N = 3000;
    std::mutex lock;
    std::vector<int> failed;
    auto fail = [](void *ctx, void *item, const spdl_error *e) {
        auto &[m, list] = *static_cast<std::pair<std::mutex *, std::vector<int> *> *>(ctx);
        std::lock_guard<std::mutex> hold(*m);
        (void)item;
        list->push_back((int)e->item);
    };
    std::pair<std::mutex *, std::vector<int> *> ctx{ &lock, &failed };
    spdl_pipeline *made;
    spdl_pipeline_desc desc = {};
    desc.workers = argc > 1 ? atoi(argv[1]) : 0;
    if (spdl_pipeline_create(
            &made, &desc,
            SPDL_STAGES(SPDL_COUNT(N),
                        spdl_pipe<spdl_index, Raw>("read",
                                                   [](spdl_task *, spdl_index *in, Raw **out) {
                                                       *out = std::make_unique<Raw>(
                                                                  Raw{ (int)in->index,
                                                                       text((int)in->index) })
                                                                  .release();
                                                       return SPDL_OK;
                                                   })
                            .with_free_item(spdl_delete<Raw>),
                        spdl_pipe<Raw, Num>("parse",
                                            [](spdl_task *, Raw *in, Num **out) {
                                                auto n = std::make_unique<Num>(parse(*in));
                                                *out = n.release();
                                                return SPDL_OK;
                                            })
                            .with_concurrency(SPDL_ALL)
                            .with_max_failures(-1)
                            .with_on_drop(fail)
                            .with_ctx(&ctx)
                            .with_free_item(spdl_delete<Num>),
                        spdl_pipe<Num, Out>(
                            "norm",
                            [](spdl_task *, Num *in, Out **out) {
                                *out = std::make_unique<Out>(Out{ in->id, norm(*in) }).release();
                                return SPDL_OK;
                            })
                            .with_concurrency(SPDL_ALL)
                            .with_max_failures(-1)
                            .with_on_drop(fail)
                            .with_ctx(&ctx)
                            .with_free_item(spdl_delete<Out>),
                        SPDL_SINK(16))) != SPDL_OK)
        return 1;
    std::unique_ptr<spdl_pipeline, spdl_deleter> p(made);
    int bad = 0, n = 0, want_failed = 0, at = 0;
    std::vector<Out> want;
    for (int i = 0; i < N; i++) try {
            want.push_back(Out{ i, norm(parse(Raw{ i, text(i) })) });
        } catch (...) {
            want_failed++;
        }
    while (auto o = spdl_next<std::unique_ptr<Out>>(p.get())) {
        bad += at >= (int)want.size() || want[at].id != o->id || want[at].norm != o->norm;
        at++, n++;
    }
    if (spdl_pipeline_failed(p.get())) std::puts(spdl_pipeline_error(p.get())->text);
    p.reset();
    std::printf("owners: %d of %zu, failed %zu of %d, %d bad: %s\n", n, want.size(), failed.size(),
                want_failed, bad,
                bad || n != (int)want.size() || (int)failed.size() != want_failed ? "WRONG"
                                                                                  : "right");
}
