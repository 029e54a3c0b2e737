from rmd_plugin.report.names import CYCLE, LABELS, PALETTE, colour, detector_style, label


def test_every_detector_has_a_look_of_its_own_and_the_papers_three_their_colours():
    assert len({tuple(detector_style(name).values()) for name in LABELS}) == len(LABELS)
    assert [colour(name) for name in ("rmd", "mahalanobis", "msp")] == [
        PALETTE[name] for name in ("blue", "vermilion", "green")
    ]
    assert len({colour(name) for name in ("rmd", "mahalanobis", "msp", "marginal", "partial", "relative_flow")}) == 6


def test_a_detector_without_an_entry_keeps_its_name_and_always_the_same_colour():
    found = detector_style("mine")
    assert found == detector_style("mine")
    assert found["color"] in CYCLE[3:]  # not that of RMD, MD or MSP
    assert label("mine") == "mine"
