"""Verify llmforge on the CUDA GPU of this machine, in one go: python -m benchmarks.verify_gpu [options].

What is verified, a step each, every one in a process of its own:

    environment              the device, its copy bandwidth, driver and package versions
    parity:PRECISION:MODEL   logits of models of tests/models/zoo.py in fp16, bf16, int8, int4 and with caches in
                             int8, against the CPU, which computes the same codes in fp32
    capture                  every planned decode step is recorded as a CUDA graph; unrecorded and replayed times
    shape:, build:           Llamas of 1B and 8B parameters with random weights, and their engines in bf16, int8, int4
    speed:ROUND:SHAPE:…      decode steps alone at 1, 8 and 64 rows, and through the scheduler TTFT and TPOT, greedy and
                             sampled; torch eager, torch.compile and vLLM, where it is installed, take turns with ours
    profile                  where a served step's time goes on the host: steps, sampling, copies, as NVTX ranges
    tensorrt, tensorrt-rtx   plans of the sample checkpoint: built, deserialized, compared, timed
    ranks                    two ranks on two GPUs, through NCCL: logits, a step's time, and the end of one of them; not
                             run where there is one GPU
    attention:…              which kernel computes attention, against what is expected of the device

--lease 40m takes of it what settles most in so much time, and stops there. To a borrowed machine without a network or
torch, a pack of engines and the runtime's wheel is carried, and runs in half an hour (README.md beside this file).

A step that fails is recorded with its reason, and the others go on. What was run is not run again, what failed with
--again alone: start it anew with the same --work to go on. However a run is ended, its step ends with it, and what was
found before is written; no second one runs in the same --work. The tables are written to WORK/gpu-evidence.md,
everything that was measured to WORK/gpu-evidence.json, what each step printed to WORK/steps.

Without a CUDA device it ends with exit code 8 and one line. --dry-run goes through the same steps on the CPU with tiny
shapes, to test this program: what it writes is labelled DRY RUN and says nothing of any GPU.
"""
