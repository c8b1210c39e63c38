"""What several methods share: batches of labelled and unlabelled images, cohort slots, split learning, traffic."""
