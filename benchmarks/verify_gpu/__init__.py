"""Verify llmforge on the CUDA GPU of this machine, in one go: python -m benchmarks.verify_gpu [options].

What is verified, a step each, every one in a process of its own:

    environment             the device, its copy bandwidth, driver and package versions
    attention:…             which kernel computes attention, against what is expected of the device
    parity:MODEL            logits of every model of tests/zoo.py on the GPU in fp16, against fp32 on the CPU
    capture                 every planned decode step is recorded as a CUDA graph; unrecorded and replayed times
    tensorrt, tensorrt-rtx  plans of the sample checkpoint: built, deserialized, compared, timed
    shape, build:PRECISION  an 8B Llama of random weights, and its engines in bf16, int8 and int4
    speed:ROUND:SUBJECT     decode throughput at batch 1, 8, 64; torch eager and torch.compile take turns with ours

A step that fails is recorded with its reason, and the others go on. What is done is not done again: start it anew with
the same --work to go on. The tables are written to WORK/gpu-evidence.md, everything that was measured to
WORK/gpu-evidence.json, what each step printed to WORK/steps.

Without a CUDA device it ends with exit code 8 and one line. --dry-run goes through the same steps on the CPU with tiny
shapes, to test this program: what it writes is labelled DRY RUN and says nothing of any GPU.
"""
