"""RULERv2: lists of numbers (basic), questions of MMLU (mmlu), documents of HotpotQA (documents), and the suite."""
