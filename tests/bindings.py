"""Makes Python bindings of spdl.h with cffi, from the header alone, and runs a pipeline with them.
Usage: bindings.py PREPROCESSED LIBRARY"""
import sys

from cffi import FFI
from pycparser import c_ast, c_generator, c_parser

ITEMS = 100


def declarations(text):
    """The public declarations as cffi reads them: no bodies of functions, no types of libc."""
    for node in c_parser.CParser().parse(text).ext:
        if isinstance(node, c_ast.FuncDef):
            continue
        if isinstance(node, c_ast.Decl) and "static" in node.storage:
            continue
        name = node.name or getattr(node.type, "name", "") or ""
        if name.startswith("spdl_"):
            yield c_generator.CGenerator().visit(node) + ";"


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        found = list(declarations(file.read()))
    ffi = FFI()
    ffi.cdef("\n".join(found))
    lib = ffi.dlopen(sys.argv[2])

    @ffi.callback("spdl_result(spdl_task *, void *, void **)")
    def number(task, _, out):
        at = lib.spdl_sequence(task)
        if at == ITEMS:
            return lib.SPDL_END
        out[0] = ffi.cast("void *", at + 1)
        return lib.SPDL_OK

    @ffi.callback("void(void *)")
    def free_nothing(_):
        pass

    function = ffi.new("spdl_function *", {"call": number})
    rows = ffi.new("spdl_stage[2]")
    text = ffi.new("char[]", b"bindings.py:1")
    for row in rows:
        row.file = text
    rows[0].kind = lib.SPDL_KIND_SOURCE
    rows[0].fn = function
    rows[0].free_item = free_nothing
    rows[1].kind = lib.SPDL_KIND_SINK
    error = ffi.new("spdl_error *")
    desc = ffi.new("spdl_pipeline_desc *", {"workers": 2, "error": error})
    pipeline = ffi.new("spdl_pipeline **")
    result = lib.spdl_pipeline_create(pipeline, desc, rows, 2)
    if result != lib.SPDL_OK:
        sys.exit(ffi.string(error.text).decode())
    item = ffi.new("void **")
    got = []
    while lib.spdl_pipeline_next(pipeline[0], item, -1) == lib.SPDL_OK:
        got.append(int(ffi.cast("uintptr_t", item[0])))
    lib.spdl_pipeline_destroy(pipeline[0])
    whole = got == list(range(1, ITEMS + 1)) and len(found) > 100
    print(f"{len(found)} declarations, {len(got)} items")
    sys.exit(not whole)


main()
