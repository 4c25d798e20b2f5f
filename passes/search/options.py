"""What tunes the search: every constant that trades planning time for better plans, and the switches of its heuristics."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchOptions:
    """The search's constants with their defaults; the same options and the same problem give the same plan.

    "A target" is a part of a budget, or of a known peak, that the search aims at.

    Attributes:
        uses_perturbation: Whether the plan of lowest peak is searched from random neighbours, too.
        uses_recursion: Whether values may be recomputed more than once.
        hull_cuts: Most cuts on the convex hull of time against saved bytes.
        bound_cuts: Most further cuts to tighten the cuts' lower bound at one budget.
        bound_backward_points, bound_forward_points: Points of the backward and of the forward at which the linear programme
            holds the budget: the worst of each of so many runs of steps or values.
        uses_moments: Whether that bound is tightened, where it leaves a gap, by moments with all that lives there.
        moment_rounds, moments_a_round: How often moments are added, and how many each time in the backward and in the forward.
        moment_gain: Moments are added once more where the last ones raised the bound by this part of the step at least.
        moment_excess: A moment is added where the rounded answer exceeds the budget by this factor.
        moment_distance: Steps or places between moments that are added together.
        branch_values: Problems in which at most so many values may be saved or not are planned by a branch and bound over the
            programme with these moments, nearly always to their optimum.  In larger ones it takes minutes.
        branch_nodes: Most nodes of that branch and bound.
        branch_seconds: Most seconds of each.  No limit by default: a plan does not depend on how fast a machine is.
        branch_rounds: How often moments are added to its answer, and it is solved again.
        moment_nodes: Larger problems, in values and steps, go without.
        rounding_starts: Starts that the local search improves, of what the programme's answers suggest.
        rounding_levels: The parts that a value is saved by in the programme's answer, above which it is saved in a start.
        max_levels: Cuts of the hull whose saved sets are starts of the search.
        close_gap: A plan this close to its lower bound, as a part of the step, is good enough: the search for it ends.
        wide_gap: Where more than this part of the step stays open, faster plans are sought among a plan's random neighbours, and
            with moments from plans for other budgets, too.
        excess_weight: A peak of twice the budget scores like this many forward passes.
        strict_factor: Factor on that weight where a plan is still above the budget, or its peak is to be lowered.
        rms_weight: Weight of the root mean square of the excess over all points of the backward, against that of the peak.
        pool_share: Values smaller than the largest by more than this factor are left to the cut and not moved one by one.
        swap_distance: A swap exchanges a saved value with an unsaved one at most this many places of the pool away.
        move_distance: Moves applied together stand at least this many places of the pool apart.
        max_joint_moves: Most moves applied together.
        max_moves: Most moves of a round; of more the swaps are thinned evenly.
        move_cells, min_moves: A round tries at most `move_cells` values and steps times moves, but `min_moves` moves at least: its
            work does not grow with the graph.
        min_gain_ns: The least improvement of a score that counts.
        rounds: Rounds of local search on a start for a budget.
        lower_target: Where the gap stays open, the plan for this part of the budget is sought as well.
        lower_targets: Where no plan for a budget is found, plans for these parts of it are sought, one after the other.
        max_segment_cuts: Most cuts between segments of the forward.
        values_per_cut: Values of the graph for each such cut at least.
        cut_width: A cut is dropped where more than this factor of its narrowest neighbour's bytes cross it.
        short_segments, long_segments: Lengths of segments, in cuts, that are simulated: the short ones with every level, the
            long ones with the `long_levels` levels of fewest saved bytes.
        tiling_offsets: Most tilings simulated for each length of segment.
        segment_labels: Labels (prefix bytes, time) kept per cut by the dynamic programme, spread evenly over the bytes.
        segment_rounds: Most corrections of segment costs for one budget.
        continuation_step: Each budget of the continuation over the one above it.
        continuation_rounds: Rounds of local search at each of them: two took half as long again and found little more.
        window_lengths: Pool places in an exchanged window; the next window of a length begins half of it later.
        window_rounds: Most exchanges, each followed by `window_search_rounds` rounds of local search.
        window_batch: Exchanges simulated together.
        min_peak_bisections: Budgets tried to find the lowest one that segments can meet.
        min_peak_starts: Plans of low peak whose peak is then lowered by local search.
        start_target: The target of one round of local search on each of those.
        min_peak_targets: Targets, as parts of the last peak, of the local search that lowers it further.
        min_peak_rounds: Rounds of local search at each of them.
        pressed_targets: The same of a local search that moves more values and goes on from the lowest plan of all; without it
            `min` of a small BERT was 1.9 % higher (`python -m benchmarks.digest --part plans`).
        floor_search_target, descent_targets: The whole search for a budget is run at the first part of the lowest peak so far, and
            then at the others of it, one after the other, for as long as one of them lowers it.  With 0.95 alone, a WaveNet's
            lowest plan was 4.5 % above its plan for a budget (`python -m benchmarks.digest --part plans`).
        same_peak: Of plans whose peaks differ by less than this factor the fastest counts as the lowest.
        perturbation_flips: Values flipped at random in one perturbation.
        max_floor_perturbations, perturbation_work: Most perturbations of the plan of lowest peak, and most perturbations times
            values to choose from.  With 600, two of them, `min` of a Qwen3 was 0.5 % higher
            (`python -m benchmarks.zoo --model qwen3 --setting min`).
        perturbation_width: Places of the pool on each side from which values are flipped, where they are flipped in one place.
        perturbation_patience: Perturbations in a row that find no better plan and end the search for one.
            With four, a graph of 21 values got a slower plan at one budget than at a lower one.
        max_perturbations, faster_work: The same limits where perturbations look for a faster plan.
        perturbation_target: The target of the local search behind each, as a part of the lowest peak.
        recursive_segment_cuts: Most cuts between segments that may be recursive.
        recursive_parts: Lengths, in cuts, of the segments between inner checkpoints.
        recursive_lengths: Lengths, in cuts, of recursive segments.
        max_inner_checkpoints: Most inner checkpoints of a recursive segment.
        recursive_rounds: Most corrections of segment costs for one budget.  With six, a Llama of 32 layers ended at 45.4 GiB
            instead of 36.3 (`compile-remat explain llama-2-7b --device h100-sxm --batch 41 --budget min`).
        recursive_bisections: Budgets tried to find the lowest one that recursive segments can meet.
        recursive_targets: Budgets for which recursive segments are sought first, as parts of the lowest peak without them; a plan
            below the first is enough, and one above it does not count.  With the first alone, `min` of a GraphSAGE was 4.1 % higher
            (`python -m benchmarks.zoo --model graph_sage --setting min`).
        recursive_lead: Below this part of a quickly found lowest peak it is the lowest: no other is sought, and a budget below it
            is out of reach of plans without recursion.
        trusted_gain: `max` departs from torch's own choice for an estimated gain of at least this part of the step.
        menu_targets: Budgets of the plan menu, as parts of the way from the lowest peak to that of the fastest plan.
        frontier_rounds: Rounds of local search for one budget of a frontier.
        frontier_segment_rounds: Corrections of segment costs for one budget of a frontier.
        frontier_anchors: Budgets at which a frontier solves the linear programme, as parts of that way; the others share those.
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
    continuation_step: float = 0.87
    continuation_rounds: int = 1
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
    descent_targets: tuple[float, ...] = (0.95, 0.98)
    same_peak: float = 0.998
    perturbation_flips: int = 4
    max_floor_perturbations: int = 64
    perturbation_work: int = 12_000
    perturbation_width: int = 8
    perturbation_patience: int = 8
    max_perturbations: int = 16
    faster_work: int = 2400
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
"""The options of a planner that was given none."""
