"use strict";
// A field above the samples: only those that contain all words of it stay, and those of one verdict if that is chosen.
const samples = [...document.querySelectorAll("details.sample")];
const texts = samples.map(each => each.textContent.toLowerCase());
const groups = [...document.querySelectorAll("section")];
const words = document.createElement("input");
words.type = "search";
words.placeholder = "Search prompts and answers";
words.setAttribute("aria-label", words.placeholder);
const choice = document.createElement("select");
choice.setAttribute("aria-label", "Verdicts to show");
for (const [value, text] of [["", "all samples"], ["better", "better after"], ["worse", "worse after"], ["wrong", "not correct after"]])
  choice.append(new Option(text, value));
const count = document.createElement("output");
const bar = document.createElement("div");
bar.className = "search";
bar.append(words, choice, count);
document.querySelector("section").before(bar);
function search() {
  const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  samples.forEach((each, place) => {
    const fits = wanted.every(word => texts[place].includes(word));
    each.hidden = !fits || (choice.value && !each.dataset.verdict.split(" ").includes(choice.value));
    shown += !each.hidden;
  });
  for (const group of groups) group.hidden = !group.querySelector("details.sample:not([hidden])");
  count.textContent = `${shown.toLocaleString("en")} of ${samples.length.toLocaleString("en")} samples`;
}
words.addEventListener("input", search);
choice.addEventListener("change", search);
search();
