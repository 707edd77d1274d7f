"""Searches the cheapest fleet that reaches a hit rate, and explains why there is none.

Knows a trace, a model and instance types. Knows nothing of files or tables. The hit rate of a fleet is that of its
instances' miss curves over the requests that PREFIX_AWARE routing gives them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import ceil, inf

from kvreuse.ops.plan.hardware import InstanceType, Model
from kvreuse.ops.simulate.routing import home, prefix_key
from kvreuse.ops.trace import Trace
from kvreuse.telemetry.miss_curve import MissCurve

__all__ = ["Blame", "Demand", "Plan", "Planner"]

_PREFIX_LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_MAX_SKEW = 1.5  # load of the busiest instance / mean, beyond which a prefix length is not taken
_MAX_LOAD = 0.85  # of the busiest instance
_BATCH = 16  # sequences that share a decode step, when decoding is priced
_EXACT_REFS = 300_000  # blocks of a trace up to which the curves are exact


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One fleet. Hit rates by tier are cumulative: host is device and host. *_tokens: of one instance."""

    instance_type: str
    num_instances: int
    usd_per_hour: float
    hit_rate: float
    hit_rate_by_tier: dict[str, float]
    pool_tokens: int
    tier_tokens: dict[str, int]
    prefix_length: int
    concurrency_threshold: int
    max_concurrency: int
    load_skew: float
    load: float
    ttft_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Blame:
    """The prompts of one template, and the part of all prompt tokens that they are first to say."""

    first_request: int
    num_requests: int
    prompt_share: float
    compulsory_share: float


@dataclass
class Demand:
    """What a fleet of `num_instances` gets: one miss curve per instance that gets anything."""

    curves: list[MissCurve]
    load_skew: float
    num_prompt_tokens: int

    def hit_rate(self, num_tokens: float) -> float:
        """With so many tokens per instance."""
        return sum(curve.hit_tokens(num_tokens) for curve in self.curves) / self.num_prompt_tokens


@dataclass
class Planner:
    """Fleets of 1 to max_instances, where the requests of the trace come `rate_factor` times as fast."""

    trace: Trace
    max_instances: int = 64
    rate_factor: float = 1.0
    _demands: dict[tuple[int, int], Demand] = field(default_factory=dict)

    @property
    def ceiling(self) -> float:
        """The hit rate of one cache without bound: what is left are tokens that nobody said before."""
        return self.demand(1, _PREFIX_LENGTHS[0]).hit_rate(inf)

    def demand(self, num_instances: int, prefix_length: int) -> Demand:
        """How the trace falls apart under PREFIX_AWARE, overflow aside."""
        key = num_instances, 0 if num_instances == 1 else prefix_length
        if key not in self._demands:
            self._demands[key] = self._split(num_instances, prefix_length)
        return self._demands[key]

    def _split(self, num_instances: int, prefix_length: int) -> Demand:
        trace, loads = self.trace, Counter[int]()
        every = 1 + sum(len(request.blocks) for request in trace.requests) // _EXACT_REFS
        curves = [MissCurve(block_size=trace.block_size, sample_every=every) for _ in range(num_instances)]
        for request in trace.requests:
            key = prefix_key(request, prefix_length=prefix_length, block_size=trace.block_size)
            number = home(key, range(num_instances))
            loads[number] += request.num_prompt_tokens
            curves[number].add(request.blocks, num_prompt_tokens=request.num_prompt_tokens)
        total = trace.num_prompt_tokens
        return Demand(curves, max(loads.values()) * num_instances / total, total)

    @cached_property
    def prefix_length(self) -> int:
        """The one with most hits without bound on eight instances, less where one of them gets too much of the load."""

        def worth(length: int) -> float:
            demand = self.demand(min(8, self.max_instances), length)
            return round(demand.hit_rate(inf) / max(1.0, demand.load_skew / _MAX_SKEW), 3)

        return max(_PREFIX_LENGTHS, key=worth)

    def plan(self, target: float, types: Sequence[InstanceType], model: Model, *, memory_ratio: float) -> Plan | None:
        """The cheapest that reaches the target, of equal ones the fastest; None when there is none."""
        sizes = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if n <= self.max_instances]

        def badness(fleet: tuple[InstanceType, int]) -> tuple[float, float, int]:
            return fleet[0].usd_per_hour * fleet[1], fleet[0].prefill_token_s(model), fleet[1]

        for kind, num_instances in sorted(product(types, sizes), key=badness):
            tiers = kind.tier_tokens(model, memory_ratio=memory_ratio)
            found = self._fleet(kind, num_instances, tiers, model) if tiers["device"] >= self._longest else None
            if found is not None and found.hit_rate >= target and found.load <= _MAX_LOAD:
                return self._trimmed(found, target)
        return None

    @property
    def _longest(self) -> int:
        return max(request.num_prompt_tokens + request.num_new_tokens for request in self.trace.requests)

    def _fleet(self, kind: InstanceType, num_instances: int, tiers: dict[str, int], model: Model) -> Plan:
        """What this fleet would do with everything it has."""
        trace, demand = self.trace, self.demand(num_instances, self.prefix_length)
        totals = {name: sum(list(tiers.values())[: place + 1]) for place, name in enumerate(tiers)}
        rates = {name: demand.hit_rate(size) for name, size in totals.items()}
        hit_rate, num = max(rates.values()), len(trace.requests)
        mean_prompt = trace.num_prompt_tokens / num
        mean_new = sum(request.num_new_tokens for request in trace.requests) / num
        prefill_s = mean_prompt * (1 - hit_rate) * kind.prefill_token_s(model)
        service_s = prefill_s + mean_new * kind.step_s(model) / _BATCH
        rate = num / trace.duration_s * self.rate_factor / num_instances
        load = rate * service_s * demand.load_skew
        ttft_s = prefill_s + kind.step_s(model) + (service_s * load / (2 * (1 - load)) if load < 1 else inf)
        in_flight = rate * (ttft_s + mean_new * kind.step_s(model)) if load < 1 else 1.0
        most = max(1, min(4096, int(tiers["device"] / (mean_prompt * (1 - hit_rate) + mean_new))))
        return Plan(
            instance_type=kind.name, num_instances=num_instances, usd_per_hour=kind.usd_per_hour * num_instances,
            hit_rate=hit_rate, hit_rate_by_tier=rates, pool_tokens=tiers["device"], tier_tokens=tiers,
            prefix_length=self.prefix_length, concurrency_threshold=max(1, min(1024, most, ceil(4 * in_flight) + 4)),
            max_concurrency=most, load_skew=demand.load_skew, load=load, ttft_s=ttft_s,
        )  # fmt: skip

    def _trimmed(self, plan: Plan, target: float) -> Plan:
        """No tier larger than the target needs: the fastest is used first."""
        demand, left = self.demand(plan.num_instances, plan.prefix_length), self._least(plan, target)
        sizes, rates, total = {}, {}, 0
        for name, size in plan.tier_tokens.items():
            sizes[name] = size if name == "device" else min(size, left)
            left, total = max(0, left - sizes[name]), total + sizes[name]
            rates[name] = demand.hit_rate(total)
        return replace(plan, tier_tokens=sizes, hit_rate_by_tier=rates, hit_rate=max(rates.values()))

    def _least(self, plan: Plan, target: float) -> int:
        """Tokens of all tiers together that reach the target."""
        demand, low, high = self.demand(plan.num_instances, plan.prefix_length), 0, sum(plan.tier_tokens.values())
        while high - low > max(self.trace.block_size, high // 100):
            middle = (low + high) // 2
            low, high = (low, middle) if demand.hit_rate(middle) >= target else (middle, high)
        return high

    def blame(self, num_groups: int = 5) -> list[Blame]:
        """The templates with most tokens that nobody said before. A template is what 1 % of the requests begin with."""
        requests = self.trace.requests
        uses = Counter(block for request in requests for block in request.blocks)
        seen: set[int] = set()
        fresh, tokens, counts, first = Counter[int](), Counter[int](), Counter[int](), dict[int, int]()
        for number, request in enumerate(requests):
            common = [block for block in request.blocks if uses[block] >= max(2, len(requests) / 100)]
            key = common[-1] if common else -1
            num_known = sum(block in seen for block in request.blocks)
            seen.update(request.blocks)
            fresh[key] += max(1, request.num_prompt_tokens - num_known * self.trace.block_size)
            tokens[key] += request.num_prompt_tokens
            counts[key] += 1
            first.setdefault(key, number)
        total = self.trace.num_prompt_tokens
        return [
            Blame(first_request=first[key], num_requests=counts[key], prompt_share=tokens[key] / total,
                  compulsory_share=amount / total)
            for key, amount in fresh.most_common(num_groups)
        ]  # fmt: skip
