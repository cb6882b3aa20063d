// The reader's choice of light or dark, before anything is painted. A classic script: modules run too late for that.
"use strict";
(() => {
  const choices = ["system", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      return localStorage.getItem("truedraft-theme");
    } catch {
      return null; // storage is forbidden: the choice lasts as long as the page
    }
  }

  function apply(choice) {
    if (choice === "system") delete root.dataset.theme;
    else root.dataset.theme = choice;
    try {
      localStorage.setItem("truedraft-theme", choice);
    } catch {
      // as above
    }
  }

  let current = choices.includes(stored()) ? stored() : "system";
  apply(current);

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const show = () => {
      button.textContent = `Theme: ${current}`;
    };
    show();
    button.addEventListener("click", () => {
      current = choices[(choices.indexOf(current) + 1) % choices.length];
      apply(current);
      show();
      document.dispatchEvent(new Event("themechange"));
    });
  });
})();
