# conan create examples/packages/conan
import os
import re

from conan import ConanFile
from conan.tools.files import copy, load


class Spdl(ConanFile):
    name = "spdl"
    license = "MIT"
    description = "Data loading pipelines in C, one header"
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, "..", "..", "..", "spdl.h"))
        self.version = re.search(r"spdl\.h - v(\S+)", text).group(1)

    def export_sources(self):
        top = os.path.join(self.recipe_folder, "..", "..", "..")
        for name in "spdl.h", "spdl_cuda.h", "LICENSE":
            copy(self, name, top, self.export_sources_folder)

    def package(self):
        copy(self, "*.h", self.source_folder, os.path.join(self.package_folder, "include"))
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))

    def package_id(self):
        self.info.clear()

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        if self.settings.os != "Windows":
            self.cpp_info.system_libs = ["pthread"]
