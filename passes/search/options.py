"""Options of the search: every constant that trades planning time for better plans, and the switches of its heuristics."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """The search's constants with their defaults; the same options and the same problem give the same plan.

    A *target* is a budget that the search aims at, given as a fraction of the asked budget or of a known peak.

    Attributes:
        uses_perturbation: True to search faster plans, and the plan of lowest peak, from random neighbours, too.
        uses_recursion: True if plans may recompute values more than once.
        hull_cuts: Most cuts on the convex hull of time against saved bytes.
        bound_cuts: Most further cuts to tighten the cuts' lower bound at one budget.
        bound_backward_points, bound_forward_points: Number of points of the backward and of the forward at which the linear
            programme enforces the budget: the steps or values are split into so many runs, and the worst of each run is a point.
        uses_moments: True to tighten that bound, if it leaves a gap, by moments that count all live buffers.
        moment_rounds, moments_a_round: Rounds in which moments are added, and most moments per round in each of both graphs.
        moment_gain: Another round follows if the last moments raised the bound by at least this fraction of the step.
        moment_excess: A moment is added where the rounded answer exceeds this factor times the budget.
        moments_gap: One moment of each graph comes first, and others only if the plan's gap to their bound is beyond this fraction
            of the step: two mostly prove as much as six, and the solver's time grows faster than the programme.  With 0.02, a plan
            of a small recurrent net at 0.5 was 0.4 % slower (`python -m benchmarks.digest --part plans`).
        moment_distance: Least distance, in steps or places, between moments added together.
        branch_values: Problems with at most so many values to decide on are planned by a branch and bound over the programme with
            these moments, nearly always to their optimum.  For larger problems, the branch and bound takes minutes.
        branch_nodes: Most nodes of that branch and bound.
        branch_seconds: Most seconds of each branch and bound.  No limit by default, so that a plan does not depend on the machine.
        branch_rounds: Most branch and bounds for a budget; after each, moments are added where its answer exceeds the budget.
        moment_nodes: Problems with more values and steps use no moments.
        rounding_starts: Most starts from the programme's answers that the local search improves.
        rounding_levels: Thresholds: a start saves the values whose saved fraction in the programme's answer exceeds one of these.
        max_levels: Cuts of the hull whose saved sets are starts of the search.
        close_gap: A plan this close to its lower bound, as a fraction of the step, is good enough: its search ends.
        wide_gap: Beyond a gap of this fraction of the step, the search also tries a plan's random neighbours.  A search with
            moments tries plans for other budgets only beyond this gap.
        excess_weight: A peak of twice the budget scores like this many forward passes.
        strict_factor: Factor on that weight while a plan is still above the budget, or while its peak is to be lowered.
        rms_weight: Weight of the root mean square of the excess over all slots of the backward, relative to the peak's excess.
        pool_share: Values smaller than the largest by more than this factor are left to the cut and not moved one by one.
        swap_distance: A swap exchanges a saved value with an unsaved one at most this many places of the pool away.
        move_distance: Moves applied together stand at least this many places of the pool apart.
        max_joint_moves: Most moves applied together.
        max_moves: Most moves of a round; beyond this number, the swaps are thinned evenly.
        move_cells, min_moves: A round tries at most `move_cells` / (values + steps) moves, but at least `min_moves`: a round's
            work does not grow with the graph.
        min_gain_ns: The least improvement of a score that counts.
        rounds: Rounds of local search on a start for a budget.
        lower_target: If the gap stays open, the search also plans for this fraction of the budget.  Without it, the plan of
            a PatchTST at 0.5 of its fastest plan's peak was 0.9 % of the step slower.
        lower_targets: If no plan for a budget is found, the search plans for these fractions of the budget, one after the other.
        max_segment_cuts: Most cuts between segments of the forward.
        values_per_cut: Least number of the graph's values per such cut.
        cut_width: A cut is dropped if more bytes cross it than this factor times the bytes of its narrower neighbour.
        short_segments, long_segments: Lengths of simulated segments, in cuts: short ones are simulated with every level, long
            ones with the `long_levels` levels of fewest saved bytes.
        tiling_offsets: Most tilings simulated for each length of segment.
        segment_labels: Labels (prefix bytes, time) kept per cut by the dynamic programme, spread evenly over the bytes.
        segment_rounds: Most corrections of segment costs for one budget.
        most_operands: Most values of one kernel whose pairs are flipped together.
        operand_rounds: Most rounds of flips of such pairs on the plan that a search has found.
        operand_share: Simulating these flips may take this part of the work that the search took before.
        operand_cells: For the lowest plan, `operand_cells` / (values + steps) of these flips may be simulated.
        priced_per_simulation: As many flips are priced for each that may be simulated; a price takes a small part of that time.
        spared_share: A plan's time may rise by this fraction of the step where its backward is spared operations; not in problems
            that are planned to their optimum.
        window_lengths: Lengths of exchanged windows, in places of the pool; windows of a length begin half a length apart.
        window_rounds: Most exchanges, each followed by `window_search_rounds` rounds of local search.
        window_batch: Exchanges simulated together.
        min_peak_bisections: Budgets tried to find the lowest budget that segments can meet.
        min_peak_starts: Plans of low peak whose peak local search then lowers.
        start_target: The target of one round of local search on each of these plans, as a fraction of the plan's peak.
        min_peak_targets: Targets, as fractions of the last peak, of the local search that lowers the peak further.
        min_peak_rounds: Rounds of local search at each of these targets.
        pressed_targets: Such targets of a local search that moves more values and starts from the lowest plan of all; without
            this search, `min` of a small BERT was 1.9 % higher (`python -m benchmarks.digest --part plans`).
        floor_search_target, descent_targets: Fractions of the lowest peak so far for which the whole search runs: once at the
            first, then at the others, one after the other, for as long as one of them lowers the peak.  With 0.95 alone, a
            WaveNet's lowest plan was 4.5 % above its plan for a budget (`python -m benchmarks.digest --part plans`).
        far_swaps: Factor on `swap_distance` and `max_moves` in one more local search for the first of these targets.  Without it,
            `min` of a diffusion transformer was 3 % higher (`python -m benchmarks.gap --part zoo --model dit`).
        close_peak: A plan whose peak times this is at most the least peak of all plans is low enough: no lower one is sought.
        same_peak: Of plans whose peaks differ by less than this factor, the fastest counts as the lowest.
        perturbation_flips: Values flipped at random in one perturbation.
        max_floor_perturbations, perturbation_work: Most perturbations of the plan of lowest peak, and most perturbations times
            values to choose from.  With a work of 600 (two perturbations), `min` of a Qwen3 was 0.5 % higher
            (`python -m benchmarks.zoo --model qwen3 --setting min`).
        perturbation_width: Places of the pool on each side from which a perturbation of one place flips values.
        perturbation_patience: The search ends after this many perturbations in a row that find no better plan.
            With four, a graph of 21 values got a slower plan at one budget than at a lower one.
        max_perturbations, faster_work: The same two limits for perturbations that look for a faster plan.  With 16, 2400 and a
            patience of eight, a ConvLSTM's plan at 0.6 was 3.7 % of the step slower (`python -m benchmarks.gap --part zoo --model
            conv_lstm`).
        perturbation_target: The target of the local search after each perturbation, as a fraction of the lowest peak.
        recursive_segment_cuts: Most cuts between segments that may be recursive.
        recursive_parts: Lengths, in cuts, of the segments between inner checkpoints.
        recursive_lengths: Lengths, in cuts, of recursive segments.
        max_inner_checkpoints: Most inner checkpoints of a recursive segment.
        recursive_rounds: Most corrections of segment costs for one budget.  With six, a Llama of 32 layers ended at 45.4 GiB
            instead of 36.3 (`compile-remat explain llama-2-7b --device h100-sxm --batch 41 --budget min`).
        recursive_bisections: Budgets tried to find the lowest budget that recursive segments can meet.
        recursive_targets: Budgets for which recursive segments are sought first, as fractions of the lowest peak without
            recursion.  The search stops at a plan within the first target, and ignores plans above it.  With the first target
            alone, `min` of a GraphSAGE was 4.1 % higher (`python -m benchmarks.zoo --model graph_sage --setting min`).
        recursive_lead: A recursive plan below this fraction of the quickly found lowest peak is the lowest plan: no other is
            sought, and a budget below that peak counts as out of reach of plans without recursion.
        trusted_gain: `max` departs from torch's own choice for an estimated gain of at least this fraction of the step.
        menu_targets: Budgets of the plan menu, as fractions of the way from the lowest peak to the fastest plan's peak.
        frontier_rounds: Rounds of local search for one budget of a frontier.
        frontier_segment_rounds: Corrections of segment costs for one budget of a frontier.
        frontier_anchors: Budgets at which a frontier solves the linear programme, as fractions of the same way; all budgets of
            the frontier share these solutions.
    """

    uses_perturbation: bool = True
    uses_recursion: bool = True
    hull_cuts: int = 12
    bound_cuts: int = 8
    bound_backward_points: int = 48
    bound_forward_points: int = 32
    uses_moments: bool = True
    moment_rounds: int = 2
    moments_a_round: int = 3
    moment_gain: float = 0.01
    moment_excess: float = 1.003
    moments_gap: float = 0.015
    moment_distance: int = 4
    branch_values: int = 24
    branch_nodes: int = 400
    branch_seconds: float = math.inf
    branch_rounds: int = 8
    moment_nodes: int = 4000
    rounding_starts: int = 3
    rounding_levels: tuple[float, ...] = (1e-6, 0.25, 0.4, 0.5, 0.6, 0.75, 1 - 1e-6)
    max_levels: int = 9
    close_gap: float = 0.008
    wide_gap: float = 0.03
    excess_weight: float = 4.0
    strict_factor: float = 10.0
    rms_weight: float = 0.2
    pool_share: int = 256
    swap_distance: int = 4
    move_distance: int = 3
    max_joint_moves: int = 64
    max_moves: int = 600
    move_cells: int = 1 << 21
    min_moves: int = 32
    min_gain_ns: float = 0.5
    rounds: int = 3
    lower_target: float = 0.95
    lower_targets: tuple[float, ...] = (0.95, 0.9, 0.85)
    max_segment_cuts: int = 50
    values_per_cut: int = 3
    cut_width: int = 2
    short_segments: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
    long_segments: tuple[int, ...] = (8, 10, 12, 16, 20, 24, 32)
    long_levels: int = 4
    tiling_offsets: int = 6
    segment_labels: int = 160
    segment_rounds: int = 4
    most_operands: int = 24
    operand_rounds: int = 3
    operand_share: float = 0.02
    operand_cells: int = 1 << 20
    priced_per_simulation: int = 64
    spared_share: float = 1e-5
    window_lengths: tuple[int, ...] = (3, 6, 12, 24, 48)
    window_rounds: int = 4
    window_search_rounds: int = 2
    window_batch: int = 128
    min_peak_bisections: int = 7
    min_peak_starts: int = 2
    start_target: float = 0.9
    min_peak_targets: tuple[float, ...] = (0.8, 0.93, 0.97)
    min_peak_rounds: int = 6
    pressed_targets: tuple[float, ...] = (0.95, 0.85)
    floor_search_target: float = 0.3
    far_swaps: int = 2
    descent_targets: tuple[float, ...] = (0.95, 0.98)
    close_peak: float = 0.995
    same_peak: float = 0.998
    perturbation_flips: int = 4
    max_floor_perturbations: int = 64
    perturbation_work: int = 12_000
    perturbation_width: int = 8
    perturbation_patience: int = 12
    max_perturbations: int = 24
    faster_work: int = 4800
    perturbation_target: float = 0.9
    recursive_segment_cuts: int = 100
    recursive_parts: tuple[int, ...] = (1, 2, 3, 4, 5, 6, 8, 10, 12)
    recursive_lengths: tuple[int, ...] = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48)
    max_inner_checkpoints: int = 6
    recursive_rounds: int = 12
    recursive_bisections: int = 6
    recursive_targets: tuple[float, ...] = (0.98, 0.9, 0.8)
    recursive_lead: float = 0.9
    trusted_gain: float = 0.01
    menu_targets: tuple[float, ...] = (0.75, 0.5, 0.25, 0.1)
    frontier_rounds: int = 2
    frontier_segment_rounds: int = 1
    frontier_anchors: tuple[float, ...] = (0.1, 0.3, 0.6)


DEFAULT = SearchOptions()
"""The options of a planner without options of its own."""
