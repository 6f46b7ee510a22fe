/* c++ -std=c++17 -O2 -I. examples/quickstart.cpp -o quickstart_cpp -lpthread */
#define SPDL_IMPLEMENTATION
#include "spdl.h"
#include <cstdio>
#include <memory>
#include <numeric>
#include <stdexcept>

int main() {
    spdl_files *files;
    spdl_pipeline *p;
    spdl_error error;
    spdl_files_desc where = {};
    where.error = &error;
    auto mean = [](spdl_task *, spdl_npz_bundle *in, double **out) {
        const spdl_npz_array *images = spdl_npz_bundle_find(in, "images");
        if (images == nullptr) throw std::runtime_error("there is no array 'images'");
        const auto *pixel = static_cast<const unsigned char *>(images->data);
        const auto count = images->info.count;
        *out = new double(std::accumulate(pixel, pixel + count, 0.0) / double(count));
        return SPDL_OK;
    };
    if (spdl_files_open(&files, "examples/data/digits_train_*.npz", &where) != SPDL_OK)
        return std::puts(error.text), 1;
    if (spdl_pipeline_create(&p, nullptr, SPDL_STAGES(
            SPDL_FILES(files), SPDL_NPZ(nullptr).with_concurrency(SPDL_ALL),
            spdl_pipe<spdl_npz_bundle, double>("mean", mean)
                .with_concurrency(SPDL_ALL).with_free_item(spdl_delete<double>),
            SPDL_SINK(3))) != SPDL_OK) return 1;
    for (int file = 1; auto value = spdl_next<std::unique_ptr<double>>(p); file++)
        std::printf("file %2d: mean of its pixels %.3f\n", file, *value);
    const bool failed = spdl_pipeline_failed(p);
    if (failed) std::puts(spdl_pipeline_error(p)->text);
    spdl_pipeline_destroy(p);
    spdl_files_close(files);
    return failed;
}
