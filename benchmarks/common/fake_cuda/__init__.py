"""Steps and rows on a CUDA device that is not there: `compile_remat._torch.fake_cuda`, which a process installs first.

    from compile_remat._torch.fake_cuda.installation import install   # before torch is imported
    install()
    from benchmarks.common.fake_cuda import step
    emitted = step.compile_step(...)                   # the wrappers of forward and backward

Benchmarks and tests emit code here; the product only lowers graphs.
"""
