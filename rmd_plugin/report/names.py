"""How detectors are called in tables and figures. Names in rows and configs stay as they are typed."""

#: what a study of ``rmd-reproduce`` leaves in its folder when it is finished
SUMMARY = "study.json"

#: detectors of this package; the others come from pytorch-ood or from the user
OURS = ("rmd", "mahalanobis", "marginal", "partial", "flow_likelihood", "relative_flow")

LABELS = {
    "rmd": "RMD",
    "mahalanobis": "MD",
    "marginal": "MMD",
    "partial": "PMD",
    "flow_likelihood": "Flow",
    "relative_flow": "Relative flow",
    "framework_rmd": "RMD (pytorch-ood)",
    "framework_mahalanobis": "MD (pytorch-ood)",
    "msp": "MSP",
    "temperature_scaling": "Temperature scaling",
    "max_logit": "MaxLogit",
    "energy": "Energy",
    "entropy": "Entropy",
    "gen": "GEN",
    "kl_matching": "KL matching",
    "openmax": "OpenMax",
    "weighted_energy": "Weighted energy",
    "knn": "KNN",
    "vim": "ViM",
    "she": "SHE",
    "fdbd": "fDBD",
    "nnguide": "NNGuide",
    "nci": "NCI",
    "gmm": "GMM",
    "pnml": "pNML",
    "dice": "DICE",
    "lts": "LTS",
    "react": "ReAct",
    "ash": "ASH",
    "scale": "SCALE",
    "vra": "VRA",
    "rankfeat": "RankFeat",
    "gradnorm": "GradNorm",
    "grad_uncertainty": "GradUncertainty",
    "nac": "NAC",
    "odin": "ODIN",
    "mahalanobis_odin": "MD + ODIN",
    "mcd": "MC dropout",
    "mcm": "MCM",
    "gram": "Gram",
    "multi_mahalanobis": "MD (all layers)",
}


def label(detector: str) -> str:
    """Name of a detector for readers; one that is not known keeps its own."""
    return LABELS.get(detector, detector)
