"""Runs a WASI program in wasmtime, with a temporary folder of its own as /tmp."""
import sys
import tempfile

import wasmtime

engine = wasmtime.Engine()
store = wasmtime.Store(engine)
module = wasmtime.Module.from_file(engine, sys.argv[1])
linker = wasmtime.Linker(engine)
linker.define_wasi()
wasi = wasmtime.WasiConfig()
wasi.argv = sys.argv[1:]
wasi.inherit_stdout()
wasi.inherit_stderr()
with tempfile.TemporaryDirectory() as folder:
    wasi.preopen_dir(folder, "/tmp")
    store.set_wasi(wasi)
    try:
        linker.instantiate(store, module).exports(store)["_start"](store)
    except wasmtime.ExitTrap as end:
        sys.exit(end.code)
