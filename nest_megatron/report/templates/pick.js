for (const group of document.querySelectorAll(".choices")) {
  const inputs = [...group.querySelectorAll("input")], answer = group.querySelector("dl");
  const pick = () => {
    for (const input of inputs) {
      const words = input.list.options[input.value].label;
      input.setAttribute("aria-valuetext", words);
      input.nextElementSibling.textContent = words;
    }
    const place = inputs.map(input => input.value).join();
    answer.replaceChildren();
    for (const head of document.querySelectorAll("[data-place]")) {
      const row = head.parentElement, picked = head.dataset.place === place;
      row.classList.toggle("picked", picked);
      for (const cell of picked ? [...row.cells].slice(1) : []) {
        const pair = answer.appendChild(document.createElement("div"));
        pair.appendChild(document.createElement("dt")).textContent = cell.dataset.label;
        pair.appendChild(document.createElement("dd")).textContent = cell.textContent;
      }
    }
  };
  group.addEventListener("input", pick);
  group.hidden = false;
  pick();
}
