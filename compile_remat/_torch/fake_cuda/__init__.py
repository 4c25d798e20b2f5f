"""A fake CUDA device: Inductor emits Triton code for fake CUDA tensors, without a GPU or a driver.

    from compile_remat._torch.fake_cuda.installation import install   # before torch is imported
    install()

Needs g++ and the package ``triton`` (with its ptxas), 2.13's wheel of torch for CPUs or any CUDA build from 2.11 on.  Real:
Dynamo, AOTAutograd, the planner, Inductor with all its passes for CUDA, Triton's compiler down to cubins.  Missing: kernel
times, the choices of autotuning, workspaces of cuDNN and cuBLAS, the allocator.

A process that has called `install` can do nothing else: it replaces functions of ``torch.cuda`` and of Inductor permanently.
No module of this package imports torch before that call.
"""
