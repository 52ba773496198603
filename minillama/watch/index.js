"use strict";
// Lists the ablations and runs of a folder, and lists them again every two seconds.
const body = document.getElementById("folders");
const connection = document.getElementById("connection");

function row(folder) {
  const tr = document.createElement("tr");
  const name = tr.appendChild(document.createElement("th"));
  const link = name.appendChild(document.createElement("a"));
  link.textContent = folder.name === "." ? "this folder" : folder.name;
  link.href = folder.name === "." ? "." : `?folder=${encodeURIComponent(folder.name)}`;
  const total = folder.total === null ? "" : `/${folder.total}`;
  const done = `${folder.done}${total} ${folder.kind === "run" ? "steps" : "cells"}`;
  for (const text of [folder.kind, folder.fate, done]) {
    const td = tr.appendChild(document.createElement("td"));
    td.className = "text";
    td.textContent = text;
  }
  tr.appendChild(document.createElement("td")).textContent = new Date(folder.changed).toLocaleString();
  return tr;
}

async function poll() {
  try {
    const response = await fetch("state", { cache: "no-store" });
    const state = await response.json();
    if (!state.folders) location.reload(); // the folder has become a run or an ablation
    body.replaceChildren(...state.folders.map(row));
    connection.textContent = state.folders.length ? "" : "No run or ablation here yet.";
  } catch {
    connection.textContent = "The server does not answer; trying again.";
  }
  setTimeout(poll, 2000);
}
poll();
