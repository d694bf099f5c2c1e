# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Appendix: the articles' claims
#
# The course follows five articles. This notebook lists their claims and the results found here. It contains no kernels
# of its own: times come from the records of the other notebooks and benchmarks, and the checks of code run below, most
# of them in the simulator. Statements that only describe a line of code are omitted unless a check can decide them.

# %%
from IPython.display import Markdown

from moe_numba.course import claims
from moe_numba.course.steps.prediction import NOISE
from moe_numba.course.verdicts import CLEAR, SEPARATE_NOISE, TOLERANCE

claims.contents()

# %% [markdown]
# ## How a verdict is computed
#
# Each claim has a translated quotation, a quantity that decides it, a threshold, and the method by which the quantity
# is measured or checked. One function, `moe_numba.course.verdicts.verdict`, computes the verdict:
#
# 1. Without a result the verdict is **not measured**, and the table names what a measurement requires.
# 2. If the measured quantity is not the one that the article describes, the verdict is **different setup**, independent
#    of the number. The column "like for like" names the difference.
# 3. If the threshold is met, the verdict is **reproduced** for a measurement, **arithmetic holds** if the claim follows
#    from the article's own numbers without a measurement, and **holds for the code** if it is about code.
# 4. Otherwise it is **not reproduced**, **arithmetic does not hold** or **does not hold for the code**.
#
# "Like for like" is "yes" for the article's own code under all conditions that the article names, and for its listings
# and numbers. "Numba port" is a kernel of this course that follows the article's listing statement by statement. A port
# can only confirm claims about which of two versions is faster, which part is largest, or what the code does. If it
# misses the threshold, the verdict is "different setup", because the article's own kernel may behave differently. A
# port does not decide absolute figures such as percentages, which depend on the compiler and the GPU; rule 2 applies to
# them.
#
# The tables list each threshold after the quantity. Thresholds of times and figures follow four rules:

# %%
Markdown(f"""
- "Faster" means {100 * NOISE:g} % less time, and "no cost" at most {100 * NOISE:g} % more, if the times were measured
  interleaved: such measurements of one kernel with the same buffers differ by less. If one of the times was measured
  apart from the others, the threshold is {100 * SEPARATE_NOISE:g} %. This concerns 64 tokens and 1 token (align, DeepEP),
  32, 8192 and 16 rows (hpc-ops), and what is computed from times of two measurements.
- "Clear" and "not small" mean {100 * CLEAR:g} % of the time.
- A figure such as "about 10 %" or "10 to 20 %" is met from the smaller number on, less {100 * TOLERANCE:g} % of it.
- A percentage of a table may differ from the table's numbers by one in the last digit.
""")

# %% [markdown]
# The records, with the GPU and the commit of each measurement. "yes" in the last column means that the measured code,
# or code that it uses, has changed since and that the measurement has not been repeated:

# %%
claims.measured()

# %% [markdown]
# ## Verdicts per article
#
# A port that misses its threshold counts as "different setup". "Not reproduced" is therefore left for the article's own
# code and for statements about the hardware.

# %%
claims.summary()

# %% [markdown]
# ## Gate
#
# The measured kernel is SGLang's, compiled with nvcc from the source that the article prints, next to torch.compile on
# the same H200.

# %%
claims.table("gate")

# %% [markdown]
# ## Align
#
# The measured kernels are Numba ports of the article's five versions, with 256 experts, top-8 and `block_size` 16
# unless a row states otherwise.

# %%
claims.table("align")

# %% [markdown]
# ## Shared experts
#
# The article serves a whole model on eight GPUs. The records measure one layer on one GPU, with another grouped GEMM.

# %%
claims.table("shared experts")

# %% [markdown]
# ## DeepEP
#
# The article prints code and reports no times, so nearly all of its claims are about code. The checks of code run a
# port of its listings in the simulator, with two ranks where ranks communicate.

# %%
claims.table("DeepEP")

# %% [markdown]
# ## hpc-ops
#
# The measured kernels are Numba ports of hpc-ops' two kernels, with 32 groups, n = 4096 and k = 7168 unless a row
# states otherwise.

# %%
claims.table("hpc-ops")
