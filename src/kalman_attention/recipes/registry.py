"""All experiments that train, by name."""

from kalman_attention.recipes import a5, mad, mqar, ou_depth, process_noise, training_length

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        mad.EXPERIMENT,
        mad.BARE_EXPERIMENT,
        training_length.EXPERIMENT,
        process_noise.EXPERIMENT,
        ou_depth.EXPERIMENT,
        mqar.EXPERIMENT,
        a5.EXPERIMENT,
    )
}
"""Experiments in the order of the paper."""
