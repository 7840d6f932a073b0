// The panels below the pictures: one is open at a time; a narrow list of tabs chooses, by mouse or with the arrow keys.
"use strict";
explorer.Tabs = class {
  // `opened(id)` is called when a panel is opened: what is drawn in a closed one has no size.
  constructor(list, opened) {
    this.list = list;
    this.opened = opened;
    this.panels = [...document.querySelectorAll("#panels > section")];
    this.buttons = this.panels.map((panel) => {
      const button = explorer.make("button", { type: "button", role: "tab", id: `tab-${panel.id}`, onclick: () => this.open(panel.id) }, panel.dataset.tab);
      button.setAttribute("aria-controls", panel.id);
      panel.setAttribute("role", "tabpanel");
      panel.setAttribute("aria-labelledby", button.id);
      return button;
    });
    list.append(...this.buttons);
    list.addEventListener("keydown", (event) => {
      const shown = this.buttons.filter((button) => !button.hidden), by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by) return;
      event.preventDefault();
      const next = shown[(shown.indexOf(document.activeElement) + by + shown.length) % shown.length];
      next.focus();
      next.click();
    });
    this.open(this.panels[0].id);
  }
  show(id, isShown) {
    this.buttons.find((button) => button.id === `tab-${id}`).hidden = !isShown;
    if (!isShown && this.current === id) this.open(this.panels.find((panel, i) => !this.buttons[i].hidden).id);
  }
  open(id) {
    this.current = id;
    this.panels.forEach((panel, i) => {
      const isOpen = panel.id === id;
      panel.hidden = !isOpen;
      this.buttons[i].setAttribute("aria-selected", isOpen);
      this.buttons[i].tabIndex = isOpen ? 0 : -1;
    });
    this.opened(id);
  }
};
